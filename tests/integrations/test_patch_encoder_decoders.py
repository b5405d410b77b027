"""patch of whole encoder-decoders: loss, logits, gradients, generated tokens, other heads, reasons."""

import copy
import warnings

import pytest
import torch

import fastenc
from tests.helpers.checkpoints import close
from tests.helpers.encoder_decoders import both_batches
from tests.helpers.families import whole
from tests.models.test_seq2seq import FAMILIES, NO_DROPOUT

SETTINGS = {"max_new_tokens": 8, "do_sample": False, "decoder_start_token_id": 3}


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs):
    ours, theirs = gradients(ours), gradients(theirs)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        close(gradient, theirs[name], atol=2e-5, rtol=1e-4)


@FAMILIES
@pytest.mark.parametrize("loss_only", [False, True])
def test_training_and_generate_are_the_models_own(family, loss_only):
    own = whole(family, **NO_DROPOUT).train()
    fused = fastenc.patch(copy.deepcopy(own), labelled_logits_only=loss_only)
    batch, _ = both_batches(family)
    expected = own(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = fused(**batch)
        expected.loss.backward()
        output.loss.backward()
        close(output.loss, expected.loss)
        real = batch["labels"] != -100
        if loss_only:
            assert output.logits is None
        else:
            close(output.logits[real], expected.logits[real], atol=1e-4)
            assert not output.logits[~real].any()
        assert_same_gradients(fused, own)
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        for beams in (1, 3):
            tokens = [
                m.eval().generate(**source, **SETTINGS, num_beams=beams) for m in (own, fused)
            ]
            assert torch.equal(*tokens)
    fastenc.unpatch(fused)
    assert torch.equal(fused(**batch).logits, own(**batch).logits)


def test_texts_beyond_the_position_table_of_m2m_100():
    """Its own forward makes the table larger, and shorter texts run fused after it."""
    own = whole("m2m_100")
    fused = fastenc.patch(copy.deepcopy(own))
    for length, warns in ((40, False), (41, True), (30, False)):
        ids = torch.randint(5, 97, (2, length))
        for labels in (ids, ids[:, :7].clone()):
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                loss = fused(input_ids=ids, labels=labels).loss
            close(loss, own(input_ids=ids, labels=labels).loss)
            if warns and labels is ids:
                assert "position table grows for more than 40 tokens" in str(given[0].message)
            assert warns or not given


def test_vectors_in_place_of_a_targets_tokens():
    """transformers' Marian scales them, too."""
    own = whole("marian", scale_embedding=True)
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches("marian")
    vectors = torch.randn(*batch.pop("labels").shape, 32)
    options = {"decoder_inputs_embeds": vectors, "use_cache": False}
    with pytest.warns(UserWarning, match="MarianDecoder takes its own forward, .* inputs_embeds"):
        logits = fused(**batch, **options).logits
    close(logits, own(**batch, **options).logits, atol=1e-4)


@FAMILIES
def test_labels_of_padding(family):
    """As of targets that are padded with a token, and whose mask is given."""
    own = whole(family, **NO_DROPOUT).train()
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches(family)
    real = batch["labels"] != -100
    batch["labels"] = batch["labels"].where(real, own.config.pad_token_id)
    expected = own(**batch, decoder_attention_mask=real.long())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        output = fused(**batch, decoder_attention_mask=real.long())
    assert "because a padding token has a label" in str(given[-1].message)
    close(output.loss, expected.loss)
    close(output.logits, expected.logits, atol=1e-4)


@pytest.mark.parametrize("family", ["t5-gated", "bart"])
@pytest.mark.parametrize("place", ["encoder", "decoder"])
def test_a_stack_that_was_replaced_runs_as_it_is(family, place):
    own = whole(family, **NO_DROPOUT).eval()
    fused = fastenc.patch(copy.deepcopy(own))
    parents = [getattr(model, "model", model) for model in (own, fused)]
    replacement = copy.deepcopy(getattr(parents[0], place))
    with torch.no_grad():
        for weight in replacement.parameters():
            weight.mul_(0.5)
    for parent in parents:
        setattr(parent, place, replacement)
    batch, _ = both_batches(family)
    close(fused(**batch).loss, own(**batch).loss)


@pytest.mark.parametrize("family", ["t5-gated", "bart", "mbart"])
def test_autocast(family):
    """Loss and all gradients, as one vector, are at most twice as far from float32 as the model's own, and a step."""
    own = whole(family, **NO_DROPOUT).train()
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches(family)

    def results(model):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    truth = results(own)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        mine, theirs = results(fused), results(own)
    for value, peer, true in zip(mine, theirs, truth, strict=True):
        far = lambda x, true=true: (x.float() - true).norm() / true.norm()
        assert far(value) <= 2 * far(peer) + 2**-8


@pytest.mark.parametrize("family", ["t5-gated", "bart", "mbart"])
def test_peft_on_every_linear_layer_is_fused(family):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_2_SEQ_LM"
    )
    torch.manual_seed(0)
    own = peft.get_peft_model(whole(family, **NO_DROPOUT), settings).train()
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)  # PEFT's are so large that float32 loses three digits
    fused = copy.deepcopy(own)
    fastenc.patch(fused.get_base_model())
    batch, _ = both_batches(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [model(**batch).loss for model in (own, fused)]
        for loss in losses:
            loss.backward()
    close(*losses)
    assert any("EncDecAttention" in name or "encoder_attn" in name for name in gradients(own))
    assert_same_gradients(fused, own)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("t5", "ForSequenceClassification"),
        ("umt5", "ForQuestionAnswering"),
        ("mt5", "Model"),
        ("bart", "ForSequenceClassification"),
        ("mbart", "ForQuestionAnswering"),
    ],
)
def test_other_heads(family, head):
    import transformers

    settings = whole(family).config
    torch.manual_seed(0)
    own = getattr(transformers, type(settings).__name__.replace("Config", head))(settings).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches(family)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["input_ids"] = inputs["input_ids"].clone()
    eos = settings.eos_token_id
    inputs["input_ids"][inputs["input_ids"] == eos] = 5
    ends = inputs["attention_mask"].sum(1) - 1
    inputs["input_ids"][torch.arange(len(ends)), ends] = eos
    if head == "Model":
        inputs |= {"decoder_input_ids": inputs["input_ids"], "use_cache": False}
    if head == "ForQuestionAnswering":
        inputs |= {"start_positions": torch.zeros(4, dtype=torch.long)}
        inputs |= {"end_positions": torch.zeros(4, dtype=torch.long)}
    if head == "ForSequenceClassification":
        inputs["labels"] = torch.tensor([0, 1, 0, 1])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        result, expected = fused(**inputs), own(**inputs)
    if head == "Model":
        real = inputs["attention_mask"].bool()
        close(result.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-4)
    elif head == "ForSequenceClassification":
        close(result.logits, expected.logits, atol=1e-4)
        close(result.loss, expected.loss)
    else:
        close(result.start_logits, expected.start_logits, atol=1e-4)
        close(result.end_logits, expected.end_logits, atol=1e-4)
        close(result.loss, expected.loss)


@FAMILIES
def test_sources_with_padding_on_the_left(family):
    own = whole(family, **NO_DROPOUT).train()
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches(family)
    order = batch["attention_mask"].sort(dim=1, stable=True).indices
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch[name].gather(1, order)
    assert not batch["attention_mask"][:, 0].all()
    expected = own(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = fused(**batch)
    close(output.loss, expected.loss)
    expected.loss.backward()
    output.loss.backward()
    assert_same_gradients(fused, own)


@FAMILIES
@pytest.mark.parametrize("training", [False, True])
def test_a_source_without_tokens(family, training):
    """Its targets attend to all of its padding in transformers' eager attention."""
    own = whole(family, **NO_DROPOUT).train(training)
    fused = fastenc.patch(copy.deepcopy(own))
    batch, _ = both_batches(family)
    batch["attention_mask"][1] = 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = fused(**batch)
    assert any("a source has no token" in str(each.message) for each in seen)
    expected = own(**batch)
    close(output.loss, expected.loss)
    if training:
        expected.loss.backward()
        output.loss.backward()
        assert_same_gradients(fused, own)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_seq2seq_trainer_runs_fused(family, tmp_path):
    """It gives the model num_items_in_batch, and generate the labels and the collator's counts."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

    own = whole(family, **NO_DROPOUT)
    batch, _ = both_batches(family)
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        predict_with_generate=True,
        generation_max_length=6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    results = []
    for model, collator in (
        (own, default_data_collator),
        (
            fastenc.patch(copy.deepcopy(own)),
            fastenc.DataCollatorWithSeqlens(default_data_collator),
        ),
    ):
        trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=rows)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="fastenc")
            trainer.train()
            predicted = trainer.predict(rows)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((torch.tensor([*losses, predicted.metrics["test_loss"]]), predicted))
    (expected, tokens), (losses, ours) = results
    close(losses, expected, atol=1e-4)
    assert ours.predictions.tolist() == tokens.predictions.tolist()
