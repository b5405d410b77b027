"""Small random models of every supported Hugging Face family, for the tests."""

import copy
import importlib
from dataclasses import dataclass, field

import pytest
import torch
from torch.overrides import TorchFunctionMode

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=40,
)


# PEFT's names of the layers to which LoRA is added.
BERT_LINEARS = dict(
    query="query",
    value="value",
    attention_out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
DISTILBERT_LINEARS = dict(
    query="q_lin", value="v_lin", attention_out="out_lin", up="lin1", down="lin2"
)
DEBERTA_LINEARS = BERT_LINEARS | dict(query="query_proj", value="value_proj")
ALBERT_LINEARS = BERT_LINEARS | dict(attention_out="attention.dense", up="ffn", down="ffn_output")
MPNET_LINEARS = BERT_LINEARS | dict(query="attn.q", value="attn.v", attention_out="attn.o")
ROTARY_LINEARS = dict(
    query="q_proj", value="v_proj", attention_out="o_proj", up="up_proj", down="down_proj"
)
MODERNBERT_LINEARS = dict(qkv="attn.Wqkv", attention_out="attn.Wo", up="mlp.Wi", down="mlp.Wo")


@dataclass(frozen=True)
class Family:
    """Fields:
    classes: how the names of its classes in transformers begin.
    sizes: values of its configuration.
    config_class: if it is another family's.
    bare_class: the class of the encoder alone.
    named_otherwise: how a class's name would end → the name, where it is another.
    linears: names of the layers to which LoRA is added.
    token_types: whether its batches have token types.
    no_heads: why it has no heads, or only ``heads``; "" if it has all of them.
    heads: the heads of a family that does not have all of them.
    no_prefix: why no prefix can be added, by PEFT or here; "" if one can.
    sees_distances: whether attention depends on the distance of tokens, so that padding between two tokens counts.
    no_positions: why a call cannot choose the positions; "" if it can.
    no_head_in_peft: why PEFT saves its heads whole only if told to; "" if it does so by itself.
    no_answers: why the tests of question answering leave it out; "" if they do not.
    no_autocast: why transformers cannot run it under autocast; "" if it can.
    """

    classes: str
    sizes: dict = field(default_factory=lambda: SIZES)
    config_class: str = ""
    bare_class: str = "Model"
    named_otherwise: dict = field(default_factory=dict)
    linears: dict = field(default_factory=lambda: BERT_LINEARS)
    token_types: bool = False
    no_heads: str = ""
    heads: tuple[str, ...] = ()
    no_prefix: str = ""
    sees_distances: bool = False
    no_positions: str = ""
    no_answers: str = ""
    no_head_in_peft: str = ""
    no_autocast: str = ""


WHOLE = "ForConditionalGeneration"  # the class of a whole encoder-decoder
ROBERTA_SIZES = SIZES | dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1)
DEBERTA_SIZES = SIZES | dict(
    relative_attention=True,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type="p2c|c2p",
    position_biased_input=False,
)
DISTILBERT_SIZES = dict(
    vocab_size=97, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=40
)
MODERNBERT_SIZES = SIZES | dict(
    num_hidden_layers=4,
    local_attention=8,
    pad_token_id=0,
    cls_token_id=1,
    bos_token_id=1,
    sep_token_id=2,
    eos_token_id=2,
)
T5_SIZES = dict(vocab_size=97, d_model=32, d_kv=32, num_layers=2, num_heads=2, d_ff=48)
T5_ENTRY: dict = dict(
    linears=dict(query="q", value="v", attention_out="o", down="wo"),
    bare_class="EncoderModel",
    sees_distances=True,
    no_heads="transformers' heads read the decoder",
    no_positions="its forward takes none",
)
ALBERT_SIZES = SIZES | dict(
    embedding_size=16, num_hidden_layers=3, num_hidden_groups=2, inner_group_num=2
)
BART_SIZES = dict(
    vocab_size=97,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=40,
)
M2M100_SIZES = BART_SIZES | dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0)
BART_ENTRY: dict = dict(
    linears=dict(query="q_proj", value="v_proj", attention_out="out_proj", down="fc2"),
    bare_class="Encoder",
    no_heads="transformers' heads read the decoder",
    no_positions="its forward takes none",
)
EUROBERT_SIZES = SIZES | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3)
EUROBERT_ENTRY: dict = dict(
    linears=ROTARY_LINEARS,
    no_prefix="rotary positions",
    sees_distances=True,
    no_answers="transformers has no class for it",
    no_head_in_peft="it looks for 'classifier', not for 'dense'",
)
BY_NAME = {
    "bert": Family("Bert", token_types=True, named_otherwise={"ForCausalLM": "BertLMHeadModel"}),
    "roberta": Family("Roberta", ROBERTA_SIZES),
    "xlm-roberta": Family("XLMRoberta", ROBERTA_SIZES),
    "xlm-roberta-xl": Family("XLMRobertaXL", ROBERTA_SIZES),
    "distilbert": Family(
        "DistilBert", DISTILBERT_SIZES, linears=DISTILBERT_LINEARS, no_prefix="PEFT has none for it"
    ),
    "electra": Family("Electra", SIZES | {"embedding_size": 16}, token_types=True),
    "mpnet": Family(
        "MPNet", SIZES, linears=MPNET_LINEARS, no_prefix="relative bias", sees_distances=True
    ),
    "deberta": Family(
        "Deberta",
        SIZES | dict(relative_attention=True, pos_att_type="c2p|p2c", position_biased_input=False),
        linears={"qkv": "in_proj"}
        | {name: BERT_LINEARS[name] for name in ("attention_out", "up", "down")},
        no_prefix="relative positions",
        no_autocast="transformers fills bfloat16 scores with the smallest float32, which is an error",
        sees_distances=True,
        no_head_in_peft="it looks for 'classifier', not for 'pooler'",
    ),
    "deberta-v2": Family(
        "DebertaV2",
        DEBERTA_SIZES,
        linears=DEBERTA_LINEARS,
        no_prefix="relative positions",
        sees_distances=True,
        no_head_in_peft="it looks for 'classifier', not for 'pooler'",
    ),
    "longformer": Family(
        "Longformer",
        ROBERTA_SIZES | dict(attention_window=8, sep_token_id=2),
        no_prefix="its attention has a window",
        sees_distances=True,
        no_answers="transformers wants three separators in each text: test_longformer.py",
    ),
    "big_bird": Family(
        "BigBird",
        SIZES | dict(attention_type="original_full"),
        token_types=True,
        no_prefix="PEFT has none for it",
        no_head_in_peft="of the head for questions it keeps the last layer only",
    ),
    "megatron-bert": Family("MegatronBert", token_types=True),
    "ernie": Family(
        "Ernie", SIZES | dict(use_task_id=True, task_type_vocab_size=3), token_types=True
    ),
    "rembert": Family(
        "RemBert",
        SIZES | dict(input_embedding_size=16, output_embedding_size=24),
        token_types=True,
    ),
    "t5": Family("T5", T5_SIZES, **T5_ENTRY),
    "t5-gated": Family("T5", T5_SIZES | {"feed_forward_proj": "gated-gelu"}, **T5_ENTRY),
    "umt5": Family("UMT5", T5_SIZES, **T5_ENTRY),
    "mt5": Family("MT5", T5_SIZES | {"feed_forward_proj": "gated-gelu"}, **T5_ENTRY),
    "albert": Family(
        "Albert", ALBERT_SIZES, linears=ALBERT_LINEARS, token_types=True, no_prefix="shared layers"
    ),
    "bart": Family("Bart", BART_SIZES, **BART_ENTRY),
    "mbart": Family("MBart", BART_SIZES | {"scale_embedding": True}, **BART_ENTRY),
    "marian": Family(
        "Marian",
        BART_SIZES | dict(pad_token_id=0, eos_token_id=2, forced_eos_token_id=2),
        named_otherwise={WHOLE: "MarianMTModel"},
        **BART_ENTRY,
    ),
    "pegasus": Family("Pegasus", BART_SIZES | {"scale_embedding": True}, **BART_ENTRY),
    "m2m_100": Family("M2M100", M2M100_SIZES, **BART_ENTRY),
    "modernbert": Family(
        "ModernBert",
        MODERNBERT_SIZES,
        linears=MODERNBERT_LINEARS,
        no_prefix="rotary positions",
        sees_distances=True,
        no_head_in_peft="it looks for 'classifier', not for 'head'",
    ),
    "nomic_bert": Family(
        "NomicBert",
        SIZES,
        linears=ROTARY_LINEARS,
        token_types=True,
        no_prefix="rotary positions",
        sees_distances=True,
        no_answers="transformers has no class for it",
        no_head_in_peft="it looks for 'classifier', not for 'pooler'",
    ),
    "roformer": Family(
        "RoFormer",
        SIZES | {"embedding_size": 16},
        token_types=True,
        no_prefix="rotary positions",
        sees_distances=True,
        no_positions="its forward takes none",
    ),
    "gte": Family(
        "Gte",
        SIZES | dict(pad_token_id=1, hidden_dropout_prob=0.1),
        linears=ROTARY_LINEARS,
        no_prefix="rotary positions",
        sees_distances=True,
        no_answers="transformers has no class for it",
        no_head_in_peft="it looks for 'classifier', not for 'pooler'",
    ),
    "jina_embeddings_v3": Family(
        "JinaEmbeddingsV3",
        ROBERTA_SIZES,
        linears=ROTARY_LINEARS | dict(up="fc1", down="fc2"),
        no_prefix="rotary positions",
        sees_distances=True,
    ),
    "eurobert": Family("EuroBert", EUROBERT_SIZES, **EUROBERT_ENTRY),
    "eurobert-grouped": Family(
        "EuroBert",
        EUROBERT_SIZES | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        **EUROBERT_ENTRY,
    ),
    "qwen3": Family(
        "Qwen3",
        SIZES
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, is_causal=False)
        | dict(pad_token_id=0, use_cache=False),
        linears=ROTARY_LINEARS,
        no_heads="transformers has no masked-LM head for it",
        heads=("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
        no_prefix="rotary positions",
        sees_distances=True,
    ),
    "gemma3": Family(
        "Gemma3Text",
        SIZES
        | dict(num_attention_heads=4, num_key_value_heads=1, head_dim=16, pad_token_id=0)
        | dict(use_cache=False)
        | dict(query_pre_attn_scalar=24, sliding_window=8, use_bidirectional_attention=True)
        | dict(layer_types=["sliding_attention", "full_attention"]),
        named_otherwise={"ForCausalLM": "Gemma3ForCausalLM"},
        linears=ROTARY_LINEARS,
        no_heads="transformers has one for sequences alone",
        heads=("ForSequenceClassification",),
        no_prefix="rotary positions",
        sees_distances=True,
    ),
    "embedding_gemma2": Family(
        "EmbeddingGemma2",
        SIZES
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0)
        | dict(global_head_dim=32, num_global_key_value_heads=1, sliding_window=8)
        | dict(hidden_size_per_layer_input=16, embedding_dim=32)
        | dict(layer_types=["sliding_attention", "full_attention"]),
        config_class="EmbeddingGemma2TextConfig",
        bare_class="TextModel",
        linears=ROTARY_LINEARS,
        no_heads="transformers has none for it",
        no_prefix="rotary positions",
        sees_distances=True,
    ),
    "esm": Family(
        "Esm",
        SIZES
        | dict(pad_token_id=1, mask_token_id=9, token_dropout=True, emb_layer_norm_before=False)
        | dict(position_embedding_type="rotary"),
        no_prefix="rotary positions",
        sees_distances=True,
        no_answers="transformers has no class for it",
    ),
    "esmc": Family(
        "Esmc",
        SIZES | dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, mask_token_id=9),
        linears=ROTARY_LINEARS,
        no_prefix="rotary positions",
        sees_distances=True,
        no_answers="transformers has no class for it",
    ),
    "ultrabert": Family(
        "Ultrabert",
        SIZES
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        | dict(num_hidden_layers=3, sliding_window=4, prediction_head_size=24),
        linears=ROTARY_LINEARS,
        no_prefix="rotary positions",
        sees_distances=True,
    ),
    "camembert": Family("Camembert", ROBERTA_SIZES),
    "data2vec-text": Family("Data2VecText", ROBERTA_SIZES),
    "big_bird-sparse": Family(
        "BigBird",
        SIZES | dict(attention_type="block_sparse", block_size=2, num_random_blocks=1),
        token_types=True,
        sees_distances=True,
    ),
}
# The tests of patch are enough: RoBERTa's classes under other names, and BigBird's attention, whose blocks count up to
# the end of the padded batch in a patched model only (tests/models/test_big_bird.py has more).
OTHER_NAMES = ("camembert", "data2vec-text", "big_bird-sparse")
ENCODERS = tuple(name for name in BY_NAME if name not in OTHER_NAMES)
# Families with every head.
FAMILIES = tuple(name for name in ENCODERS if not BY_NAME[name].no_heads)
# Families of the tests of question answering.
ANSWERERS = tuple(name for name in FAMILIES if not BY_NAME[name].no_answers)


# Other classes with a head, which patch takes: how their names end → families that have one. Longformer's class for
# multiple choice wants three separators in each text: test_longformer.py.
OTHER_HEADS = {
    "ForMultipleChoice": (
        *("bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "distilbert", "electra", "mpnet"),
        *("deberta-v2", "big_bird", "megatron-bert", "ernie", "rembert", "albert"),
        *("modernbert",),
        *("roformer", *OTHER_NAMES),
    ),
    "ForPreTraining": (
        *("bert", "electra", "big_bird", "megatron-bert", "ernie", "albert", "big_bird-sparse"),
    ),
    "ForNextSentencePrediction": ("bert", "megatron-bert", "ernie"),
    "ForCausalLM": (
        *("bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "electra", "big_bird"),
        *("megatron-bert", "ernie", "rembert", "roformer", "qwen3", "gemma3", *OTHER_NAMES),
    ),
    "ForTokenClassification": ("t5", "t5-gated", "umt5", "mt5"),
}


# Families of encoder-decoders, and the first token of their targets.
START_TOKENS = {
    "t5": 0,
    "t5-gated": 0,
    "mt5": 0,
    "umt5": 0,
    "bart": 2,
    "mbart": None,
    "marian": 0,
    "pegasus": 0,
    "m2m_100": 2,
}
ENCODER_DECODERS = tuple(START_TOKENS)


def skip_without_autocast(family: str) -> None:
    if BY_NAME[family].no_autocast:
        pytest.skip(BY_NAME[family].no_autocast)


CLASSES = {name: family.classes for name, family in BY_NAME.items()}


def config(family: str, **changes):
    import transformers

    entry = BY_NAME[family]
    name = entry.config_class or f"{entry.classes}Config"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**(entry.sizes | changes))


def dropouts(family: str) -> dict[str, float]:
    """The names of the dropout probabilities in a configuration, each with 0."""
    probabilities = config(family).to_dict().items()
    is_number = lambda p: isinstance(p, int | float) and not isinstance(p, bool)
    return {name: 0.0 for name, p in probabilities if "dropout" in name and is_number(p)}


def class_name(family: str, task: str) -> str:
    """The name of transformers' class."""
    entry = BY_NAME[family]
    ending = entry.bare_class if task == "Model" else task
    return entry.named_otherwise.get(ending, entry.classes + ending)


def modeling_module(settings):
    """The module of a configuration's models: transformers does not export all of them (BART's encoder)."""
    return importlib.import_module(type(settings).__module__.replace("configuration_", "modeling_"))


def model(family: str, task: str = "Model", **changes):
    """A random model. Its weights are large enough for a mistake to show, and no bias is near 0."""
    torch.manual_seed(0)
    settings = config(family, **changes)
    result = getattr(modeling_module(settings), class_name(family, task))(settings)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.requires_grad:  # RoFormer's table of angles is a constant
                parameter.add_(0.1 * torch.randn_like(parameter))
    return result.eval()


def whole(family: str, **changes):
    """A random encoder-decoder."""
    return model(family, WHOLE, decoder_start_token_id=START_TOKENS[family], **changes)


class _SoftmaxInFloat64(TorchFunctionMode):
    """Ignores the dtype that a model gives to softmax. Longformer's is float32 in every dtype; in float64, where its
    mask is beyond float32's range, that makes NaN of rows of padding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.softmax and args[0].dtype == torch.float64:
            kwargs["dtype"] = None
        return function(*args, **kwargs)


def in_float64(model):
    """A copy of a transformers model that computes in float64."""
    exact = copy.deepcopy(model).double()
    forward = exact.forward

    def in_mode(*args, **kwargs):
        with _SoftmaxInFloat64():
            return forward(*args, **kwargs)

    exact.forward = in_mode
    return exact


def padded_batch(family: str, lengths=(5, 17, 1, 30), seed: int = 0) -> dict[str, torch.Tensor]:
    """A right-padded batch of random tokens, with token types if the family has them."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = len(lengths), max(lengths)
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 97, (rows, length), generator=generator)
    pad = config(family).pad_token_id
    batch = {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask}
    if BY_NAME[family].token_types:
        types = torch.randint(0, 2, (rows, length), generator=generator)
        batch["token_type_ids"] = types * mask
    return batch
