"""A learned mix of layers below every head, compared with transformers' states mixed in plain torch."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fastenc.adapt import (
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    freeze_encoder,
)
from fastenc.data import train_tokenizer
from fastenc.models import (
    Encoder,
    QuestionAnswerer,
    SentenceEmbedder,
    SequenceClassifier,
    SpanClassifier,
    TokenClassifier,
)
from fastenc.train import TrainConfig
from fastenc.train.finetuning import default_lr
from fastenc.train.optimizer import parameter_groups
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.commands import failure, run
from tests.helpers.families import FAMILIES, model, padded_batch

GAMMA = 1.6
SPANS = dict(  # in the first sequence, which has five tokens
    word_rows=torch.arange(5),
    windows=torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 4]]),
    starts=torch.tensor([0, 1, 3]),
    ends=torch.tensor([1, 1, 4]),
)


def mixed_model(model_class, folder, **options):
    ours = model_class.from_pretrained(folder, layer_mix=True, **options)
    mix = ours.encoder.mix
    with torch.no_grad():
        mix.scalars.copy_(scalars(len(mix.scalars)))
        mix.gamma.fill_(GAMMA)
    return ours


def scalars(count):
    return torch.linspace(-1, 1, count).sin() * torch.tensor([1.0, -2.0]).repeat(count)[:count]


def plain_mix(states):
    """(mixed states, s, gamma) with gradients."""
    s, gamma = scalars(len(states)).requires_grad_(), torch.tensor(GAMMA, requires_grad=True)
    return gamma * (s.softmax(0)[:, None, None, None] * torch.stack(states)).sum(0), s, gamma


def check(ours, logits, expected, s, gamma):
    """Compare values, and the mix's gradients of a weighted sum of the logits."""
    close(logits, expected)
    weights = torch.randn_like(expected)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    close(ours.encoder.mix.scalars.grad, s.grad, rtol=1e-3, atol=1e-4)
    close(ours.encoder.mix.gamma.grad[0], gamma.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "model_class, task, head",
    [
        (TokenClassifier, "TokenClassification", lambda m, x: m.classifier(x)),
        (QuestionAnswerer, "QuestionAnswering", lambda m, x: m.qa_outputs(x)),
        (
            SequenceClassifier,
            "SequenceClassification",
            lambda m, x: m.classifier(m.bert.pooler(x)),
        ),
    ],
)
def test_heads_read_the_mix(model_class, task, head, tmp_path):
    theirs = model("bert", f"For{task}")
    ours = mixed_model(model_class, save(theirs, tmp_path))
    batch = padded_batch("bert")
    mixed, s, gamma = plain_mix(theirs(**batch, output_hidden_states=True).hidden_states)
    expected = head(theirs, mixed)
    if model_class is not SequenceClassifier:
        expected = expected[batch["attention_mask"].bool()]
    check(ours, ours(packed(batch)).logits, expected, s, gamma)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_vectors_of_texts_pool_the_mix(pooling, tmp_path):
    theirs = model("bert")
    ours = mixed_model(SentenceEmbedder, save(theirs, tmp_path), pooling=pooling)
    batch = padded_batch("bert")
    mixed, s, gamma = plain_mix(theirs(**batch, output_hidden_states=True).hidden_states)
    mask = batch["attention_mask"].bool()
    rows = [row[inside] for row, inside in zip(mixed, mask, strict=True)]
    by = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "max": lambda x: x.max(0).values}
    expected = F.normalize(torch.stack([by[pooling](row) for row in rows]), dim=1)
    check(ours, ours(packed(batch)).logits, expected, s, gamma)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_mixes_its_states(family, tmp_path):
    """For spans, whose head is ours: it gets the mix of transformers' states."""
    theirs = model(family)
    folder = save(theirs, tmp_path)
    ours = mixed_model(SpanClassifier, folder, label_names=["A", "B"], max_span_words=2)
    batch = padded_batch(family)
    mixed, s, gamma = plain_mix(theirs(**batch, output_hidden_states=True).hidden_states)
    hidden = mixed[batch["attention_mask"].bool()]
    expected = ours(replace(packed(batch), hidden=hidden), **SPANS).logits
    check(ours, ours(packed(batch), **SPANS).logits, expected, s, gamma)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_under_autocast_and_in_bfloat16(family, tmp_path):
    """The states of different layers may have different dtypes."""
    ours = mixed_model(TokenClassifier, save(model(family), tmp_path), num_labels=3)
    batch = packed(padded_batch(family))
    exact = ours(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = ours(batch).logits
    assert (logits - exact).norm() < 0.05 * exact.norm()
    logits.float().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in ours.encoder.mix.parameters())
    logits = ours.bfloat16()(batch).logits
    assert logits.dtype == torch.bfloat16 and (logits - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_mix_is_saved_with_the_model(family, tmp_path):
    folder = save(model(family), tmp_path / "base")
    assert TokenClassifier.from_pretrained(folder, num_labels=2).encoder.mix is None
    ours = mixed_model(TokenClassifier, folder, num_labels=2)
    ours.save_pretrained(tmp_path / "saved")
    batch = packed(padded_batch(family))
    again = TokenClassifier.from_pretrained(tmp_path / "saved")
    assert again.config.layer_mix
    assert torch.equal(again(batch).logits, ours(batch).logits)
    bare = Encoder.from_pretrained(tmp_path / "saved")
    expected = ours.encoder(batch).last_hidden_state
    assert torch.equal(bare(batch).last_hidden_state, expected)
    bare.save_pretrained(tmp_path / "encoder")
    hidden = Encoder.from_pretrained(tmp_path / "encoder")(batch).last_hidden_state
    assert torch.equal(hidden, expected)
    without = Encoder.from_pretrained(tmp_path / "encoder", layer_mix=False)
    close(
        without(batch).last_hidden_state, Encoder.from_pretrained(folder)(batch).last_hidden_state
    )


def test_transformers_reads_the_last_layer_of_a_mixed_checkpoint(tmp_path):
    from transformers import AutoModelForTokenClassification

    import fastenc

    ours = mixed_model(TokenClassifier, save(model("bert"), tmp_path / "base"), num_labels=2)
    ours.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved").eval()
    batch = padded_batch("bert")
    inside = batch["attention_mask"].bool()
    unmixed = TokenClassifier.from_pretrained(tmp_path / "saved", layer_mix=False)
    with torch.no_grad():
        expected = unmixed(packed(batch)).logits
        close(theirs(**batch).logits[inside], expected)
        fastenc.patch(theirs)
        close(theirs(**batch).logits[inside], expected)


def test_a_mix_without_its_weights_is_incomplete(tmp_path):
    folder = tmp_path / "saved"
    mixed_model(TokenClassifier, save(model("bert"), tmp_path / "base"), num_labels=2)
    ours = mixed_model(TokenClassifier, tmp_path / "base", num_labels=2)
    ours.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert {"bert.layer_mix.scalars", "bert.layer_mix.gamma"} <= tensors.keys()
    del tensors["bert.layer_mix.scalars"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"is incomplete: .* lacks the head's encoder.mix.scalars"):
        TokenClassifier.from_pretrained(folder)


def test_an_adaptation_is_saved_with_the_mix(tmp_path):
    ours = TokenClassifier.from_pretrained(
        save(model("bert"), tmp_path / "base"), num_labels=2, layer_mix=True
    )
    add_adaptation(ours, Lora(2))
    assert all(parameter.requires_grad for parameter in ours.encoder.mix.parameters())
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    ours.save_pretrained(tmp_path / "adapted")
    again = TokenClassifier.from_pretrained(tmp_path / "adapted")
    batch = packed(padded_batch("bert"))
    assert torch.equal(again.encoder.mix.scalars, ours.encoder.mix.scalars)
    close(again(batch).logits, ours.eval()(batch).logits)


def test_a_frozen_encoders_mix_is_trained_at_a_rate_of_its_own(tmp_path):
    ours = TokenClassifier.from_pretrained(
        save(model("bert"), tmp_path), num_labels=2, layer_mix=True
    )
    freeze_encoder(ours)
    scales = {
        id(parameter): group["lr_scale"]
        for group in parameter_groups(ours, 0.1, layer_decay=0.5)
        for parameter in group["params"]
    }
    trained = {name: scales[id(p)] for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == {
        "encoder.mix.scalars": 100.0,
        "encoder.mix.gamma": 100.0,
        "head.out.weight": 1.0,
        "head.out.bias": 1.0,
    }


@pytest.mark.parametrize("adaptation", [Lora(2), Adapters(2), PrefixTuning(2), PromptTuning(2)])
def test_with_an_adaptation_a_mix_learns_as_fast_as_without(adaptation, tmp_path):
    ours = TokenClassifier.from_pretrained(
        save(model("bert"), tmp_path), num_labels=2, layer_mix=True
    )

    def mix_lr():
        (scale,) = {
            group["lr_scale"]
            for group in parameter_groups(ours, 0.1)
            for parameter in group["params"]
            if parameter is ours.encoder.mix.scalars
        }
        return scale * default_lr(ours, TrainConfig("out"), len(TEXTS))

    without = mix_lr()
    add_adaptation(ours, adaptation)
    assert mix_lr() == pytest.approx(without)


TEXTS = ["a fine film", "a dull film", "the long dull book", "a fine book about rivers"]


@pytest.fixture
def base(tmp_path):
    tokenizer = train_tokenizer(TEXTS, vocab_size=50)
    folder = save(model("bert", vocab_size=tokenizer.get_vocab_size()), tmp_path / "base")
    encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(folder)
    return folder


def test_sentence_transformers_reads_the_mix(base, tmp_path):
    from sentence_transformers import SentenceTransformer

    ours = mixed_model(SentenceEmbedder, base)
    ours.save_pretrained(tmp_path / "vectors")
    peer = SentenceTransformer(str(tmp_path / "vectors"), device="cpu")
    expected = peer.encode(TEXTS, convert_to_tensor=True)
    close(ours.encode(TEXTS), expected)
    close(SentenceEmbedder.from_pretrained(tmp_path / "vectors").encode(TEXTS), expected)
    with pytest.raises(
        ValueError, match="pooling must not be last-four for a model with layer_mix"
    ):
        model("bert", num_hidden_layers=4).save_pretrained(tmp_path / "four")
        SentenceEmbedder.from_pretrained(tmp_path / "four", layer_mix=True, pooling="last-four")


@pytest.fixture
def data(tmp_path):
    """A training file for each task."""
    table = "sentence\tlabel\n" + "".join(f"{text}\t{text.split()[1]}\n" for text in TEXTS)
    (tmp_path / "texts.tsv").write_text(table)
    pairs = "sentence1\tsentence2\tscore\n"
    pairs += "".join(f"{a}\t{b}\t{i}\n" for i, (a, b) in enumerate(pairwise(TEXTS)))
    (tmp_path / "pairs.tsv").write_text(pairs)
    tagged = "\n".join(
        "".join(f"{word}\t{'B-X' if word in ('film', 'book') else 'O'}\n" for word in text.split())
        for text in TEXTS
    )
    (tmp_path / "words.conll").write_text(tagged)
    question = {
        "id": "q",
        "question": "what film",
        "answers": [{"text": "fine", "answer_start": 2}],
    }
    squad = {"data": [{"paragraphs": [{"context": TEXTS[0], "qas": [question]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    return tmp_path


@pytest.mark.parametrize(
    "task, file, options",
    [
        ("sequence-classification", "texts.tsv", ()),
        ("token-classification", "words.conll", ("--crf",)),
        ("span-ner", "words.conll", ()),
        ("question-answering", "squad.json", ("--stride", 2)),
        ("sentence-embedding", "pairs.tsv", ("--similarity", "score")),
    ],
)
def test_every_task_trains_evaluates_and_predicts_with_a_mix(base, data, task, file, options):
    out = data / "out"
    command = ("finetune", base, data / file, "--task", task, "-o", out, "--layers", "mix")
    said = run(*command, *options, "--epochs", 8, "--metric", "loss", "--dev", data / file)
    assert "mix of layers: embeddings 0." in said and "layer 2 0." in said and "gamma" in said
    assert "| layers | mix |" in (out / "README.md").read_text()
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert 0 < max(rates) <= 5e-5 * 768 / 32, "the log shows the weights' rate"
    scalars = Encoder.from_pretrained(out).mix.scalars
    assert scalars.abs().max() > 1e-3, "it has learned"
    run("evaluate", out, data / file)
    suffix = ".json" if task == "question-answering" else ".jsonl"
    run("predict", out, data / file, "-o", data / f"predictions{suffix}")
    assert (data / f"predictions{suffix}").stat().st_size


def test_bad_input_is_named(base, data, capsys):
    command = ("finetune", base, data / "texts.tsv", "-o", data / "out", "--layers")
    assert "layers must be mix, or left out, got '3'" in failure(capsys, *command, "3")
    said = failure(capsys, *command, "mix", "--adapt", "features")
    assert "--layers mix needs every layer's output, but --adapt features stores one" in said
    said = failure(capsys, *command, "mix", "--task", "word-sense")
    assert (
        "word-sense cannot train a weighted sum of layers, got --layers mix: leave it out" in said
    )
    assert not (data / "out").exists()
