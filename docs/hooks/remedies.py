"""What the warnings of :mod:`messages` come from, and what helps: {text: (cause, remedy)}."""

OWN = "None is needed: the results are right, and as slow as without the patch."

REASONS = {
    "it is being traced": ("`torch.jit.trace`, also of an export to ONNX.", OWN),
    "it is inside a function transform (torch.func)": (
        "`torch.func.vmap`, `grad`, `functional_call` with a transform.",
        OWN,
    ),
    "it is inside forward-mode differentiation": ("`torch.autograd.forward_ad`.", OWN),
    "… is a …": (
        "An input is a subclass of Tensor, such as a DTensor, or no tensor.",
        "Give plain tensors.",
    ),
    "… is …": ("Token ids or types are not int32 or int64.", "Give `x.long()`."),
    "there is no fused attention for … on …": (
        "The model's dtype, or autocast's, has no kernel on this device, or the extension is not compiled.",
        "float32 or bfloat16 on a CPU, also float16 on a GPU; see `fastenc info`.",
    ),
    "its weights are on the meta device": (
        "accelerate's offloading (`device_map` with `disk`, `cpu_offload`) loads a module's weights when the module's "
        "forward is called. The fused forward does not call the modules' forwards.",
        "Load the model without offloading, if it fits into memory.",
    ),
    "its forward was replaced before it was patched": (
        "`model.forward = ...`, as by `accelerator.prepare` in mixed precision or a `device_map` over several devices.",
        "Patch first. After `accelerator.prepare`: `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`, then "
        "patch.",
    ),
    "it was called with …": (
        "The call asks for something that is not computed, such as `output_attentions`.",
        "Leave the argument out. `fastenc.analysis` has statistics of attention.",
    ),
    "it needs exactly one of input_ids and inputs_embeds": (
        "Both are given, or neither.",
        "Give one. The own forward raises transformers' error.",
    ),
    "the batch is empty": ("No row, or no column.", "Skip empty batches."),
    "… is not (batch, length)": (
        "A mask of three or four dimensions, or of another length than the inputs.",
        "Give the tokenizer's `attention_mask`.",
    ),
    "a row starts with padding": (
        "Padding on the left, or a row of padding only, on a GPU or in a model that cannot keep padding.",
        '`tokenizer.padding_side = "right"`; leave out empty texts.',
    ),
    "masked tokens have the id … and not config.pad_token_id, …": (
        "The mask hides tokens that may not be padding: they have one id that is neither the configuration's nor 0. "
        "ColBERT reads the states of such tokens, those of its query expansion.",
        "None for ColBERT. If the tokens are padding: `config.pad_token_id = tokenizer.pad_token_id`.",
    ),
    "rotary angles of more than … tokens depend on the batch": (
        "A longer batch than the model's positions, with rotary angles that are scaled by its length (dynamic, "
        "longrope).",
        "Cut the texts: `tokenizer(..., truncation=True)`.",
    ),
    "its position table grows for more than … tokens": (
        "M2M100 and NLLB make their position table larger for longer texts.",
        "Cut the texts: `tokenizer(..., truncation=True, max_length=model.config.max_position_embeddings)`.",
    ),
    "config.… is on": (
        "`output_attentions`, `is_decoder` or `is_causal` in the configuration.",
        "Set it to False.",
    ),
    "the decoder's attention mask has padding before a token": (
        "A `decoder_attention_mask` with a 0 before a 1.",
        "Pad targets on the right, or give `labels` without a mask.",
    ),
    "a source has no token": (
        "A row of `encoder_attention_mask` (of `attention_mask` in a call of the whole model) is all 0.",
        "Leave out texts without tokens.",
    ),
    "there are no states of an encoder": (
        "A decoder was called without `encoder_hidden_states`.",
        "Call the whole model.",
    ),
    "encoder_attention_mask is not (batch, length)": (
        "A mask of four dimensions, or of another batch.",
        "Give a mask with a 1 for every token and a 0 for every padding token of the source.",
    ),
    "labels and input_ids are not (batch, length)": (
        "An encoder-decoder was called with labels, but with `inputs_embeds` or other shapes.",
        "Give `input_ids` and `labels`, each (batch, length).",
    ),
    "decoder_input_ids have another shape than labels": (
        "The two do not belong together.",
        "Leave out `decoder_input_ids`: they are made from the labels.",
    ),
    "lm_head is not that of the class": (
        "`lm_head` was replaced, for example by an adapter or a quantised layer.",
        "None; the encoder and the decoder are fused all the same.",
    ),
    "hidden states are requested": (
        "`output_hidden_states` in the configuration, with labels.",
        "Set it to False for training.",
    ),
    "a row has padding between tokens": (
        "The mask has a 0 before a 1, and attention reads distances (windows, rotary angles, relative biases).",
        "Remove the masked tokens instead of masking them.",
    ),
    "it was called with position_ids": (
        "Attention reads distances, and the call gives positions of its own.",
        "Leave them out.",
    ),
    "there are global module hooks": (
        "`register_module_forward_hook` or its kin, which many profilers use.",
        "Remove them after use.",
    ),
    "its configuration names other windows or blocks": (
        "`config.local_attention` or the kinds of layers were changed after `patch`.",
        "`fastenc.unpatch(model)`, then `fastenc.patch(model)`.",
    ),
    "its configuration was changed: …": (
        "The configuration now holds values that are not supported.",
        "Change it back.",
    ),
    "a probability of dropout is 1": ("Everything is dropped.", "Give less than 1."),
    "some modules of … are in training mode, and others are not": (
        "`eval()` was called on a part of a layer.",
        "Call `train()` or `eval()` on the model.",
    ),
    "it skips layers in training": (
        "A BART or one of its kin whose `encoder_layerdrop` or `decoder_layerdrop` is above 0, such as M2M100.",
        "`from_pretrained(name, encoder_layerdrop=0.0, decoder_layerdrop=0.0)`; in evaluation nothing is skipped.",
    ),
    "… is a …, not a …": (
        "A module was replaced, as methods of PEFT other than LoRA, quantisation and adapters do.",
        "None, if you need the other module. See [what is not fused](not-fused.md).",
    ),
    "the forward of … is not transformers'": (
        "A class of transformers, or its forward, was replaced for all models, as Liger's kernels do.",
        "Undo that, if you do not need it.",
    ),
    "its attention is …, a function of …": (
        "`model.set_attn_implementation(...)` with a function that was registered with `AttentionInterface`.",
        '`model.set_attn_implementation("sdpa")`, if you do not need the function.',
    ),
    "… has hooks": ("A forward or backward hook on a module.", "`handle.remove()` after use."),
    "… of … was changed": (
        "A constant or a buffer is not what the class makes of its configuration: in ModernBERT after "
        "`model.to(torch.bfloat16)`, which rounds the rotary frequencies; `out_features` of a masked LM's decoder "
        "after `set_output_embeddings` with another vocabulary.",
        "Load in the wanted dtype: `from_pretrained(name, dtype=torch.bfloat16)`. Change a vocabulary by "
        "`model.resize_token_embeddings(size)`, which changes the configuration too.",
    ),
    "a table that follows from its configuration was changed": (
        "RoFormer's table of rotary angles is not the one that its class computes.",
        "Load the file's table again; the fused forward computes the angles itself.",
    ),
    "the set of buffers": (
        'A buffer was added or removed; the message goes on with "of … was changed".',
        "Register buffers outside the encoder.",
    ),
    "… has other modules than a new …": (
        "A module was added to the encoder.",
        "Put it beside the encoder.",
    ),
    "the LoRA of … …": (
        "LoRA of a form that is not fused. The message ends with one of the rows whose cause begins with LoRA.",
        "See that row.",
    ),
    "… was …": (
        "A module was added or removed (set to None).",
        "Build the model without this change.",
    ),
    "a weight is a …": (
        "A weight is a subclass of Tensor: DTensor of FSDP2, a quantised tensor.",
        "None; outside of FSDP2 and quantisation the forward is fused.",
    ),
    "a weight is …": ("A weight is sparse.", "`weight.to_dense()`."),
    "its linear layers are of …": (
        "Their weights have several dtypes. transformers keeps `wo` of T5 in float32 if it loads float16, and computes "
        "it so.",
        "Load T5 in bfloat16.",
    ),
    "a weight has shape …, not …": (
        "A weight was cut or enlarged, as by pruning or a 4-bit storage.",
        "Build the model from a configuration with these sizes.",
    ),
    "a bias has shape …, not …": ("As above, a bias.", "As above."),
    "is merged and disabled, and its own forward subtracts it": (
        "LoRA: `merge_adapter()`, then `disable_adapter()`. The first call unmerges it; later calls are fused.",
        "None is needed.",
    ),
    "has transposed weights (fan_in_fan_out)": (
        "LoRA: `LoraConfig(fan_in_fan_out=True)`.",
        "Leave it out; it is for GPT-2.",
    ),
    "has hooks or a replaced forward": ("LoRA: a hook inside its layers.", "Remove it."),
    "is a variant (…)": (
        "LoRA: aLoRA and other variants, or several DoRAs at a time.",
        "Plain LoRA and one DoRA are fused.",
    ),
    "has matrices that are not linear layers": ("LoRA: other matrices.", "Plain LoRA is fused."),
    "has a … as its dropout": ("LoRA: another dropout.", "`nn.Dropout` is fused."),
    "the base model has hooks": (
        "A masked LM: the encoder has hooks, which calling it must run.",
        "`handle.remove()` after use.",
    ),
    "its loss is divided by num_items_in_batch": (
        "ModernBERT's masked LM in a Trainer: its loss is divided by the number of labels of the whole step. The "
        "encoder is fused, the head is not.",
        "`trainer.model_accepts_loss_kwargs = False`: the Trainer takes the mean over micro-batches instead.",
    ),
    "with config.sparse_prediction it returns the logits of labelled tokens only": (
        "ModernBERT's `sparse_prediction`.",
        "Set it to False, and give `patch` `labelled_logits_only=True`.",
    ),
    "a padding token has a label": (
        "Labels at padding tokens, on a GPU or in a model that cannot keep padding.",
        "-100 at padding tokens, as transformers' collators give.",
    ),
    "the head reads padding (without input_ids)": (
        "Classification with Qwen3 or Gemma 3 from `inputs_embeds`: the head takes the last token of a row, also where "
        "it is padding.",
        "Give `input_ids`, or texts of one length.",
    ),
    "the head reads padding (its ids are not config.pad_token_id, …)": (
        "Classification with Qwen3 or Gemma 3: the head takes the last token whose id is not `config.pad_token_id`, "
        "and the batch is padded with another id.",
        "`config.pad_token_id = tokenizer.pad_token_id`.",
    ),
    "the head reads padding (before a token)": (
        "Classification with Qwen3 or Gemma 3 and padding on the left: of a text whose ids are all "
        "`config.pad_token_id` the head takes the row's first token, which is padding.",
        '`tokenizer.padding_side = "right"`.',
    ),
    "the head reads padding (summary_type is …)": (
        "Multiple choice with padding, of RoFormer, and of ELECTRA unless its `summary_type` is `first`: the head "
        "takes the last token of the padded row, or the mean of all its tokens.",
        'Give choices of one length, or `config.summary_type = "first"` before the model is made and trained.',
    ),
    "the loss reads the position before a token, which is padding": (
        "A class for causal language models with labels and padding before a token, on a GPU or in a model that cannot "
        "keep padding: its loss compares each label with the logits of the position before.",
        '`tokenizer.padding_side = "right"`.',
    ),
    "the question-answering loss is a softmax over the padded length": (
        "`start_positions` with padding, on a GPU or in a model that cannot keep padding.",
        "`fastenc finetune --task question-answering` is fused: its softmax is over the tokens of the text. Inference "
        "without `start_positions` is fused.",
    ),
    "it is a replica of DataParallel": (
        "`torch.nn.DataParallel`, which the Trainer uses for several GPUs in one process.",
        "A process a GPU: `torchrun`, or `accelerate launch`.",
    ),
}

OTHERS = {
    "fastenc: … in … is not patched: …": (
        "A module with several models of transformers, such as a text encoder beside an image encoder. `patch` takes "
        "those that it knows.",
        "None is needed: the models that `patch` knows are fused. The end of the message names what it knows.",
    ),
    "the model has no tokenizer: … lacks the split into words by …. Make token ids with transformers' tokenizer": (
        "RoFormer, whose tokenizer splits words with a library that tokenizer.json cannot name.",
        "Give token ids, made by transformers' tokenizer.",
    ),
    "… takes its reference, …: impl=… cannot take this call: …": (
        "A call of `attention` with a dtype, shape or device that no kernel takes.",
        "The end of the message says what the kernel takes.",
    ),
    "fastenc's compiled extension is not available (…); every op takes its slower PyTorch reference path. To compile "
    "it: pip install --no-build-isolation fastenc, with a C++ compiler.": (
        "It was installed without a compiler, or with another PyTorch. A GPU still runs the Triton kernels.",
        "Install it again; `fastenc info` shows what is compiled.",
    ),
    "…; encode() without a pooling takes the mean": (
        "The folder's files of sentence-transformers name modules or a pooling that are not known. None of its "
        "settings is read: no prompts, no maximum length.",
        "Give `encode(..., pooling=..., normalize=..., prompt=...)`, or patch a SentenceTransformer.",
    ),
    "the spans mask … of the … tokens that they should, because single words have too many tokens for such short "
    "sequences: give larger blocks, or a tokenizer trained on these languages": (
        "Pretraining with `span`: whole words do not fit the budget of masks.",
        "`--block-size`, or `fastenc tokenizer`.",
    ),
    "… lacks …… of the objective …: their training begins with random values": (
        "Pretraining `--from` a checkpoint without the objective's head, such as `span` from a masked LM.",
        "None, if that is the checkpoint that you mean.",
    ),
    "… has no tokens…. It is read as the unknown token. Remove such words if they are a mistake": (
        "The tokenizer removes a word of a labelled file, such as a zero-width joiner that stands alone.",
        "Remove the word, or leave it.",
    ),
    "… is neither an IOB2 nor a BIOES tag, but other tags are. No tag is read as an entity's. If the column holds "
    "entities, correct this tag; a word outside entities has the tag O": (
        "A column of tags, one of which is no tag of the scheme.",
        "Correct the tag, or choose another `--tag-column`.",
    ),
    "…: the labels … and … differ by case or spaces alone and are two classes. If they are one, write them alike": (
        "A column of classes in which one class is written in two ways, such as with a space at its end.",
        "Write the class in one way.",
    ),
    "…: column … holds entities of the same types, which are not read: "
    "give tag_column=… and inner_tag_column=… to read every level": (
        "Nested entities in several columns.",
        "The options that the message names.",
    ),
    "…: … of … entities cannot be predicted and count as missed, the first in …. They are longer than "
    "max_span_words=… or a window, or have the same words as another entity": (
        "`span-ner`: entities beyond its limits.",
        "`--max-span-words`, or longer windows.",
    ),
    "… cuts longer texts at their start, fastenc cuts them at their end": (
        "`truncation_side` in tokenizer_config.json is `left`.",
        "Give shorter texts; to fine-tune a classifier, `--truncation tail`.",
    ),
    "the model has no tokenizer: transformers cannot make one from … (…). Give token ids instead of texts": (
        "A checkpoint without tokenizer.json, and transformers, or a library that it needs, cannot read the other "
        "file.",
        "`pip install 'fastenc[transformers]'`, which also brings what reads a SentencePiece model. Or give token ids.",
    ),
    "… has a column …, which is not read, …: give …": (
        "`sentence-embedding` trains on pairs alone, and the file also has scores or hard negatives.",
        "The options that the message names, or none if the pairs alone are meant.",
    ),
}
