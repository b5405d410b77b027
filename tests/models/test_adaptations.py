"""LoRA, bottleneck adapters, prefixes and prompts. test_peft.py compares them with the PEFT library's."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fastenc import freeze
from fastenc.adapt import (
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    load_adaptation,
    merge_adaptation,
    trained_parameters,
    unmerge_adaptation,
    use_adaptation,
)
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SequenceClassifier, TokenClassifier
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.layer import run_single_ops
from fastenc.packing import pack_sequences
from fastenc.train import TrainConfig, Trainer
from tests.helpers.adaptations import disturb
from tests.helpers.layers import HEAD_DIM, HEADS, KINDS, Layer

CONFIG = EncoderConfig(
    vocab_size=40, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=32, max_positions=16
)
BATCH = pack_sequences([[1, 5, 9, 2], [1, 7, 2], [1, 2]])
METHODS = (
    Lora(rank=2, targets=("query", "value", "attention_out", "down"), dropout_p=0.1),
    Adapters(4),
    PrefixTuning(3),
    PromptTuning(2),
)
by_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


@pytest.fixture
def base(tmp_path):
    """A loaded classifier, which therefore knows where its encoder came from."""
    torch.manual_seed(0)
    SequenceClassifier(CONFIG, num_labels=3).save_pretrained(tmp_path / "base")
    return SequenceClassifier.from_pretrained(tmp_path / "base")


@by_method
def test_only_the_parts_and_the_head_are_trained(base, method):
    before = base(BATCH).logits
    add_adaptation(base, method)
    if isinstance(method, Lora | Adapters):
        torch.testing.assert_close(base(BATCH).logits, before, rtol=0, atol=1e-6)
    base.train()
    base(BATCH, torch.tensor([0, 1, 2])).loss.backward()
    for name, parameter in base.named_parameters():
        added = "adaptations." in name or "prompts." in name or name.startswith("head.")
        assert (parameter.grad is not None) == parameter.requires_grad == added, name
    trained, everything = trained_parameters(base)
    assert 0 < trained < everything


@by_method
def test_gradients_are_those_of_finite_differences(base, method):
    add_adaptation(base, method)
    disturb(base)
    base.double()
    labels = torch.tensor([0, 1, 2])
    base(BATCH, labels).loss.backward()
    torch.manual_seed(2)
    for name, parameter in base.named_parameters():
        if parameter.grad is None:
            continue
        direction = torch.randn_like(parameter)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step * direction)
                # The model computes its loss in float32.
                values.append(F.cross_entropy(base(BATCH).logits, labels))
                parameter.sub_(step * direction)
        slope = float((values[0] - values[1]) / 2e-5)
        assert float((parameter.grad * direction).sum()) == pytest.approx(
            slope, rel=1e-3, abs=1e-5
        ), name


def test_prefix_and_prompt_are_rows_that_every_token_sees(base):
    """Compared with attention written out: the prefix's keys and values are added to the sequence's own."""
    layer = Layer(KINDS["bert"], (4, 3, 2), grad=False)
    prefix = torch.randn(5, 2, HEADS * HEAD_DIM)
    (y,) = layer.run(run_single_ops, adaptation=LayerAdaptation(prefix=prefix))
    keys, values = (half.view(5, HEADS, HEAD_DIM).transpose(0, 1) for half in prefix.unbind(1))

    def attend(x, v, linear):
        heads = lambda name: linear(x, name).view(len(x), HEADS, HEAD_DIM).transpose(0, 1)
        q, k, u = (heads(name) for name in ("query", "key", "value"))
        k, u = torch.cat([keys, k], 1), torch.cat([values, u], 1)
        return F.scaled_dot_product_attention(q, k, u).transpose(0, 1).flatten(1)

    layer._attend = attend
    torch.testing.assert_close(y, layer.plain()[0], rtol=1e-5, atol=1e-5)


def test_a_prefix_stands_on_the_first_positions(base):
    """The tokens behind it compute the same as at these later positions, with the prefix's keys and values."""
    add_adaptation(base, PrefixTuning(3))
    disturb(base)
    later = replace(BATCH, position_ids=BATCH.position_ids + 3)
    expected = base(BATCH).logits
    base.encoder.adapted.first_position = 0
    assert torch.equal(base(later).logits, expected)


def test_a_prefix_takes_positions_from_the_longest_sequence(base):
    longest = pack_sequences([[1] * 13])
    add_adaptation(base, PrefixTuning(3))
    assert base.positions == base.encoder.max_tokens == 13
    base(longest)
    message = "at most 13 tokens, the model's 16 positions less its prefix's 3, got 14: cut it"
    with pytest.raises(ValueError, match=message):
        base(pack_sequences([[1] * 14]))
    use_adaptation(base, None)
    assert base.positions == 16
    base(pack_sequences([[1] * 16]))
    with pytest.raises(ValueError, match="must be less than the model's 16 positions, got 16"):
        add_adaptation(base, PrefixTuning(16), "long")
    assert "long" not in base.encoder.adapted.descriptions


@by_method
def test_checkpoint_holds_the_parts_alone_and_loads_as_a_model(base, method, tmp_path):
    add_adaptation(base, method)
    disturb(base)
    expected = base(BATCH).logits
    base.save_pretrained(tmp_path / "adapted")
    names = {path.name for path in (tmp_path / "adapted").iterdir()}
    assert names == {"config.json", "adapter_config.json", "adapter_model.safetensors"}
    loaded = SequenceClassifier.from_pretrained(tmp_path / "adapted")
    assert torch.equal(loaded(BATCH).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    again = SequenceClassifier.from_pretrained(tmp_path / "again")
    assert torch.equal(again(BATCH).logits, expected)


@by_method
def test_a_pooler_that_the_encoder_lacked_is_trained_and_saved(method, tmp_path):
    Encoder(CONFIG.replace(pooler=False)).save_pretrained(tmp_path / "bare")
    model = SequenceClassifier.from_pretrained(tmp_path / "bare", num_labels=3)
    add_adaptation(model, method)
    assert model.encoder.pooler.weight.requires_grad
    disturb(model)
    model.save_pretrained(tmp_path / "adapted")
    loaded = SequenceClassifier.from_pretrained(tmp_path / "adapted")
    assert torch.equal(loaded(BATCH).logits, model(BATCH).logits)


def test_a_bare_encoder_keeps_the_pooler_that_it_lacked(tmp_path):
    Encoder(CONFIG.replace(pooler=False)).save_pretrained(tmp_path / "bare")
    encoder = Encoder.from_pretrained(tmp_path / "bare")
    add_adaptation(encoder, Lora(rank=2))
    disturb(encoder)
    encoder.save_pretrained(tmp_path / "adapted")
    loaded = Encoder.from_pretrained(tmp_path / "adapted")
    assert torch.equal(loaded(BATCH).pooled, encoder(BATCH).pooled)


@by_method
def test_a_task_s_adaptation_loads_as_a_bare_encoder(base, method, tmp_path):
    add_adaptation(base, method)
    disturb(base)
    base.save_pretrained(tmp_path / "adapted")
    encoder = Encoder.from_pretrained(tmp_path / "adapted")
    expected = base.encoder(BATCH).last_hidden_state
    assert torch.equal(encoder(BATCH).last_hidden_state, expected)
    # And the other way: an encoder's adaptation under a head.
    encoder.save_pretrained(tmp_path / "encoder")
    again = SequenceClassifier.from_pretrained(tmp_path / "encoder")
    assert torch.equal(again.encoder(BATCH).last_hidden_state, expected)


def test_merging_is_exact_within_rounding_and_undone_bit_for_bit(base, tmp_path):
    add_adaptation(base, METHODS[0])
    disturb(base)
    expected = base(BATCH).logits
    weights = copy.deepcopy(base.state_dict())
    merge_adaptation(base)
    torch.testing.assert_close(base(BATCH).logits, expected, rtol=1e-5, atol=1e-6)
    base.save_pretrained(tmp_path / "merged")
    merged = SequenceClassifier.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(BATCH).logits, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="one that is merged already: call unmerge_adaptation"):
        merge_adaptation(base)
    with pytest.raises(ValueError, match=r"call fastenc\.adapt\.unmerge_adaptation first"):
        use_adaptation(base, None)
    unmerge_adaptation(base)
    assert all(torch.equal(value, weights[name]) for name, value in base.state_dict().items())
    assert torch.equal(base(BATCH).logits, expected)
    with pytest.raises(ValueError, match="nothing to unmerge"):
        unmerge_adaptation(base)


def test_lora_outside_the_layers_drops_in_training_and_is_trained_while_in_use():
    config = CONFIG.replace(hidden_dropout_p=0.0, attention_dropout_p=0.0)
    model = SequenceClassifier(config, num_labels=3).eval()
    add_adaptation(model, Lora(rank=2, targets=("pooler", "word"), dropout_p=0.5))
    disturb(model)
    again = lambda: torch.equal(model(BATCH).logits, model(BATCH).logits)
    assert again()
    model.train()
    assert not again()
    add_adaptation(model, Lora(rank=2, targets=("pooler", "word")), "second")
    for name, other in (("second", "default"), ("default", "second")):
        use_adaptation(model, name)
        trained = {n for n, parameter in model.named_parameters() if parameter.requires_grad}
        assert any(f".{name}." in each for each in trained)
        assert not any(f".{other}." in each for each in trained)


def test_a_frozen_model_computes_with_what_is_merged_and_unmerged():
    """Freezing copies the weights, at a width that the kernels pack."""
    wide = CONFIG.replace(hidden_size=64, intermediate_size=128)
    model = SequenceClassifier(wide, num_labels=3).eval()
    add_adaptation(model, METHODS[0])
    disturb(model)
    with torch.inference_mode():
        logits = lambda: model(BATCH).logits
        expected = logits()
        use_adaptation(model, None)
        plain = logits()
        freeze(model)
        torch.testing.assert_close(logits(), plain)
        use_adaptation(model, "default")
        merge_adaptation(model)
        torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
        freeze(model)
        torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
        unmerge_adaptation(model)
        torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
        use_adaptation(model, None)
        torch.testing.assert_close(logits(), plain)


def test_adaptations_are_swapped_each_with_its_head(base, tmp_path):
    plain, expected = base(BATCH).logits, {}
    for name, method in zip("abcd", METHODS, strict=True):
        add_adaptation(base, method, name)
        disturb(base)
        expected[name] = base(BATCH).logits
    base.save_pretrained(tmp_path / "d")
    for name in "cadb":
        use_adaptation(base, name)
        assert torch.equal(base(BATCH).logits, expected[name])
    use_adaptation(base, None)
    assert torch.equal(base(BATCH).logits, plain)
    load_adaptation(base, tmp_path / "d", "e")
    assert torch.equal(base(BATCH).logits, expected["d"])


def state_of(adapted):
    """Everything that an added adaptation changes."""
    encoder = adapted.encoder
    return (
        {name: parameter.requires_grad for name, parameter in adapted.named_parameters()},
        dict(encoder.adapted.descriptions),
        encoder.adapted.current,
        encoder.adapted.first_position,
        list(encoder.adapted.heads),
    )


def saved(base, tmp_path, method=METHODS[0], **options):
    """The folder of an adaptation whose model was loaded with these options."""
    other = SequenceClassifier.from_pretrained(base.base, **options)
    add_adaptation(other, method)
    disturb(other)
    other.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@by_method
def test_what_does_not_fit_leaves_the_model_as_it_was(base, method, tmp_path):
    folder = saved(base, tmp_path, method)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    head = next(key for key in tensors if key.endswith("classifier.weight"))
    added = next(key for key in tensors if "classifier" not in key)
    before, expected = state_of(base), base(BATCH).logits
    narrow = {**tensors, head: tensors[head][:1].clone()}
    lost = {key: value for key, value in tensors.items() if key != added}
    for held, message in ((narrow, "classifier.weight has shape"), (lost, "lacks")):
        save_file(held, file)
        with pytest.raises(ValueError, match=message):
            load_adaptation(base, folder)
        assert state_of(base) == before
        assert torch.equal(base(BATCH).logits, expected)
    save_file(tensors, file)
    load_adaptation(base, folder)
    assert not torch.equal(base(BATCH).logits, expected)


def test_lora_of_a_table_that_the_decoder_reads_is_not_merged():
    def words(tied):
        model = MaskedLM(replace(CONFIG, extra={"tie_word_embeddings": tied})).eval()
        add_adaptation(model, Lora(rank=2, targets=("word",)))
        disturb(model)
        return model

    tied, untied = words(True), words(False)
    before = tied(BATCH).logits
    with pytest.raises(ValueError, match=r"a LoRA of 'word' cannot be merged .* use it unmerged"):
        merge_adaptation(tied)
    assert torch.equal(tied(BATCH).logits, before)
    expected = untied(BATCH).logits
    merge_adaptation(untied)
    torch.testing.assert_close(untied(BATCH).logits, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_added_while_an_adaptation_is_merged(base):
    add_adaptation(base, METHODS[0])
    disturb(base)
    merge_adaptation(base)
    before, expected = state_of(base), base(BATCH).logits
    with pytest.raises(ValueError, match=r"call fastenc\.adapt\.unmerge_adaptation first"):
        add_adaptation(base, Adapters(2), "second")
    assert state_of(base) == before
    assert torch.equal(base(BATCH).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_names": ["a", "b", "c"]}, r"other has a head whose id2label is .*'a'.*'LABEL_0'"),
        (
            {"problem_type": "multi_label_classification"},
            "head whose problem_type is multi_label_classification, the model's is single_label",
        ),
        ({"long_texts": {"chunks": "mean"}}, "head whose long_texts is .*'mean'"),
    ],
)
def test_a_head_with_another_meaning_is_an_error(base, options, message, tmp_path):
    folder = saved(base, tmp_path, **options)
    before = state_of(base)
    with pytest.raises(ValueError, match=rf"{message}.*SequenceClassifier.from_pretrained"):
        load_adaptation(base, folder)
    assert state_of(base) == before
    tagger = TokenClassifier.from_pretrained(saved_encoder(base, tmp_path), num_labels=3)
    with pytest.raises(ValueError, match="other was fine-tuned for another task"):
        load_adaptation(tagger, folder)


def saved_encoder(base, tmp_path):
    base.encoder.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


@by_method
def test_killed_adapted_run_resumes_bit_for_bit(base, method, tmp_path):
    rows = [[1, 5 + i % 30, 7, 2] for i in range(24)]
    steps = []

    def collate(chosen, step):
        steps.append(step)
        labels = torch.tensor([row[1] % 3 for row in chosen])
        return {"batch": pack_sequences(chosen), "labels": labels}

    def run(folder, resume=False):
        torch.manual_seed(0)
        own = SequenceClassifier.from_pretrained(tmp_path / "base")
        add_adaptation(own, method)
        config = TrainConfig(
            str(tmp_path / folder), max_steps=8, batch_size=4, learning_rate=1e-2, save_every=2
        )
        trainer = Trainer(own, config, rows, [4] * 24, collate)
        trainer.train(resume=resume)
        return own

    whole = run("whole")
    run("cut")
    for path in sorted((tmp_path / "cut").glob("checkpoint-*"))[-1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    steps.clear()
    resumed = run("cut", resume=True)
    assert steps == [6, 7], "the steps after the last checkpoint that is left"
    ours = dict(whole.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in resumed.named_parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Lora(rank=0), "rank must be at least 1, got 0"),
        (lambda m: Lora(targets=("classifier",)), "targets must be of .*'classifier'"),
        (lambda m: Lora(dropout_p=1.0), r"dropout_p must be in \[0, 1\), got 1.0"),
        (lambda m: add_adaptation(m, Adapters(), "not a name"), "name must be letters"),
        (lambda m: use_adaptation(m, "missing"), "got 'missing': add it first"),
        (lambda m: merge_adaptation(m), "only a LoRA in use"),
    ],
)
def test_bad_arguments_are_named(base, make, message):
    with pytest.raises(ValueError, match=message):
        make(base)


def test_a_model_replaces_the_adaptation_that_its_folder_had(base, tmp_path):
    add_adaptation(base, Lora(rank=2))
    with pytest.raises(ValueError, match="in another folder than its encoder's checkpoint"):
        base.save_pretrained(base.base)
    disturb(base)
    base.save_pretrained(tmp_path / "folder")
    merge_adaptation(base)
    base.save_pretrained(tmp_path / "folder")
    loaded = SequenceClassifier.from_pretrained(tmp_path / "folder")
    assert torch.equal(loaded(BATCH).logits, base(BATCH).logits)
    assert not [*(tmp_path / "folder").glob("adapter*")]


def test_adaptation_without_a_saved_encoder_or_of_another_is_an_error(base, tmp_path):
    fresh = Encoder(CONFIG)
    add_adaptation(fresh, Adapters(2))
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        fresh.save_pretrained(tmp_path / "fresh")
    with pytest.raises(ValueError, match="has an adaptation 'default' already"):
        add_adaptation(fresh, Adapters(2))
    add_adaptation(base, Lora())
    base.save_pretrained(tmp_path / "adapted")
    file = tmp_path / "adapted" / "adapter_config.json"
    values = json.loads(file.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora must be False, got True"),
        ({"peft_type": "IA3"}, "peft_type must be one of .* got 'IA3'"),
        ({"target_modules": ["dense"]}, "target_modules must name the same linear layers|lacks"),
        ({"r": 2}, "has shape"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, "which cannot be loaded"),
    ):
        file.write_text(json.dumps({**values, **change}))
        with pytest.raises(ValueError, match=message):
            SequenceClassifier.from_pretrained(tmp_path / "adapted")
