"""Training on a frozen encoder's stored outputs is the same as training on the frozen encoder."""

import json
import random
from dataclasses import replace
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fastenc.adapt import (
    Lora,
    add_adaptation,
    cache_features,
    features,
    freeze_encoder,
    use_adaptation,
)
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, SentenceEmbedder
from fastenc.packing import pack_sequences
from fastenc.tasks import (
    QuestionAnswering,
    SequenceClassification,
    SpanNer,
    SparseEmbedding,
    TokenClassification,
)
from fastenc.train import TrainConfig, task_trainer
from tests.helpers import families
from tests.helpers.adaptations import disturb
from tests.helpers.checkpoints import save
from tests.helpers.commands import failure, run

NAMES, VERBS, PLACES = (
    ["ada", "bob", "grace hopper"],
    ["saw", "liked", "left"],
    ["paris", "new york"],
)
TASKS = {
    "sequences": (SequenceClassification(max_length=16), "train.tsv"),
    "tokens": (TokenClassification(max_length=12), "train.conll"),
    "crf": (TokenClassification(max_length=12, crf=True), "train.conll"),
    "answers": (QuestionAnswering(max_length=24, stride=4), "train.jsonl"),
    "spans": (SpanNer(max_length=12), "train.conll"),
    "sparse": (
        SparseEmbedding(12, text=("sentence", "label"), query_flops=0, document_flops=0),
        "train.tsv",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same sentences with labels for each task, and encoders of two families."""
    folder = tmp_path_factory.mktemp("features")
    draw = random.Random(0)
    table, columns, questions = ["sentence\tlabel"], [], []
    for number in range(70):
        name, verb, place = (draw.choice(words) for words in (NAMES, VERBS, PLACES))
        text = f"{name} {verb} {place}"
        table.append(f"{text}\t{verb}")
        for part, entity_type in ((name, "PER"), (verb, ""), (place, "LOC")):
            for i, word in enumerate(part.split()):
                columns.append(
                    f"{word} {'BI'[i > 0]}-{entity_type}" if entity_type else f"{word} O"
                )
        columns.append("")
        answers = {"text": [place], "answer_start": [text.index(place)]}
        question = {"id": str(number), "question": "where", "context": text, "answers": answers}
        questions.append(json.dumps(question))
    (folder / "train.tsv").write_text("\n".join(table) + "\n")
    (folder / "train.conll").write_text("\n".join(columns) + "\n")
    (folder / "train.jsonl").write_text("\n".join(questions) + "\n")
    tokenizer = train_tokenizer([line.split("\t")[0] for line in table], vocab_size=60)
    for family in ("bert", "distilbert"):
        torch.manual_seed(0)
        encoder = Encoder(
            EncoderConfig(
                vocab_size=60,
                hidden_size=32,
                num_layers=2,
                num_heads=2,
                intermediate_size=64,
                max_positions=40,
                type_vocab_size=2 if family == "bert" else 0,
                family=family,
                pooler=family == "bert",
            )
        )
        encoder.tokenizer = tokenizer
        encoder.save_pretrained(folder / family)
    return folder


def prepared(folder, task, data, family="bert"):
    train = task.read(folder / data)
    torch.manual_seed(0)
    model = task.load(folder / family, train)
    freeze_encoder(model)
    return model, train


def losses(output):
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("name", TASKS)
def test_training_from_the_cache_is_training_on_the_frozen_encoder(folder, tmp_path, name, family):
    task, data = TASKS[name]
    metrics, models = [], []
    for kept in (None, tmp_path / "features"):
        model, train = prepared(folder, task, data, family)
        if kept is None:  # the encoder's dropout stays off although the trainer sets training mode
            model.encoder.train = MethodType(
                lambda self, mode=True: nn.Module.train(self, False), model.encoder
            )
        output = tmp_path / ("without" if kept is None else "with")
        config = TrainConfig(str(output), epochs=2, batch_size=8, learning_rate=5e-3, log_every=1)
        metrics.append(task_trainer(task, model, train, config, dev=train, features=kept).train())
        models.append(model)
    torch.testing.assert_close(
        losses(tmp_path / "with"), losses(tmp_path / "without"), rtol=1e-4, atol=1e-5
    )
    without, from_cache = (model.state_dict() for model in models)
    for key, value in from_cache.items():
        torch.testing.assert_close(value, without[key], rtol=1e-3, atol=1e-4, msg=key)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3)
    # The checkpoint is an ordinary one, which predicts without the cache what was evaluated with it.
    loaded = task.load(tmp_path / "with")
    # The batch size of the training, because other texts of a batch are candidates in the loss of pairs.
    again = task.evaluate(loaded, train, task.encode(train, loaded), config.batch_size)
    assert again["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-4)


@pytest.mark.parametrize("family", ["longformer", "deberta-v2", "eurobert", "gemma3"])
def test_stored_vectors_are_those_that_the_familys_head_reads(folder, tmp_path, family):
    """The first token of a text with a global token, of all distances, every token, the last token."""
    save(families.model(family), tmp_path / "encoder")
    encoder = Encoder.from_pretrained(tmp_path / "encoder")
    encoder.tokenizer = Encoder.from_pretrained(folder / "bert").tokenizer
    encoder.save_pretrained(tmp_path / "encoder")
    task, data = TASKS["sequences"]
    model, train = prepared(folder, task, data, tmp_path / "encoder")
    config = TrainConfig(str(tmp_path / "run"), max_steps=1, learning_rate=5e-3)
    trainer = task_trainer(task, model, train, config, dev=train, features=tmp_path / "kept")
    stored = trainer.train()["loss"]
    loaded = task.load(tmp_path / "run")
    # The batch size of the training, because other texts of a batch are candidates in the loss of pairs.
    again = task.evaluate(loaded, train, task.encode(train, loaded), config.batch_size)
    assert again["loss"] == pytest.approx(stored, rel=1e-4)


def cached(model, task, examples, folder, **options):
    return cache_features(
        model, examples, task.collate, folder, per_token=not task.reads_first_token, **options
    )


@pytest.mark.parametrize("name", ["sequences", "tokens"])
def test_vectors_are_the_encoders_whatever_the_shards(folder, tmp_path, name, monkeypatch):
    task, data = TASKS[name]
    model, train = prepared(folder, task, data)
    examples = task.encode(train, model)
    monkeypatch.setattr(features, "SHARD_BYTES", 4 * 32 * 40)  # 40 vectors
    model.train()  # the vectors have no dropout even then
    cache = cached(model, task, examples, tmp_path, batch_size=3)
    assert model.encoder.training
    model.eval()
    assert len(list(tmp_path.glob("*/*.safetensors"))) > 1 and len(cache) == len(examples)
    chosen = [63, 0, 5, 6, 41]
    batch = task.collate([examples[place] for place in chosen])["batch"]
    filled = cache.fill(batch, chosen)
    expected = model.encoder(batch)
    output = model.encoder(filled)
    if not task.reads_first_token:
        torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state)
    else:
        first = expected.last_hidden_state[batch.cu_seqlens[:-1].long()]
        torch.testing.assert_close(output.last_hidden_state, first)
        torch.testing.assert_close(output.pooled, expected.pooled)
    half = cached(model, task, examples, tmp_path, dtype=torch.float16).fill(batch, chosen)
    assert half.hidden.dtype == torch.float32
    torch.testing.assert_close(half.hidden, filled.hidden, rtol=2**-10, atol=1e-6)
    sizes = [sum(f.stat().st_size for f in path.iterdir()) for path in tmp_path.iterdir()]
    assert min(sizes) < 0.8 * max(sizes)


def test_stored_vectors_are_reused_only_for_the_same_inputs(folder, tmp_path, monkeypatch):
    task, data = TASKS["sequences"]
    model, train = prepared(folder, task, data)
    examples = task.encode(train, model)
    cached(model, task, examples, tmp_path)
    (made,) = tmp_path.iterdir()

    def fail(*_):
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr(features, "_outputs", fail)
        cached(model, task, examples, tmp_path)
        # The vectors depend on neither the head nor the pooler.
        model.head["out"].weight.data.add_(1)
        model.encoder.pooler.weight.data.add_(1)
        cached(model, task, examples, tmp_path)
        shorter = SequenceClassification(max_length=4)
        others = [
            (examples[1:], {}),
            (shorter.encode(train, model), {}),
            (examples, {"dtype": torch.bfloat16}),
            (examples, {"autocast_dtype": torch.bfloat16}),
        ]
        for other, options in others:
            with pytest.raises(AssertionError, match="computed again"):
                cached(model, task, other, tmp_path, **options)
        # The failed run left no files.
        assert list(tmp_path.iterdir()) == [made]
    model.encoder.layers[1].down.weight.data[0, 0] += 1e-3
    cached(model, task, examples, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_vectors_are_those_of_the_token_types_and_of_the_adaptation_in_use(folder, tmp_path):
    task, data = TASKS["sequences"]
    model, train = prepared(folder, task, data)
    for name in ("one", "other"):
        add_adaptation(model, Lora(rank=2), name)
        disturb(model.encoder)
    model.encoder.requires_grad_(False)
    examples = task.encode(train, model)[:9]

    def second_type(chosen):
        batch = task.collate(chosen)["batch"]
        return {"batch": replace(batch, token_type_ids=torch.ones_like(batch.input_ids))}

    for number, (name, collate) in enumerate(
        (("one", task.collate), ("other", task.collate), ("other", second_type)), 1
    ):
        use_adaptation(model, name)
        model.encoder.requires_grad_(False)
        cache = cache_features(model, examples, collate, tmp_path, per_token=False)
        assert len(list(tmp_path.iterdir())) == number
        batch = collate(examples)["batch"]
        expected = model.eval().encoder(batch).last_hidden_state[batch.cu_seqlens[:-1].long()]
        torch.testing.assert_close(cache.fill(batch, range(9)).hidden, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vectors_have_the_precision_of_the_training(folder, tmp_path, precision):
    task, data = TASKS["tokens"]
    model, train = prepared(folder, task, data)
    config = TrainConfig(str(tmp_path / "run"), max_steps=1, precision=precision)
    task_trainer(task, model, train, config, features=tmp_path / "kept")
    (vectors,) = (tmp_path / "kept").glob("*/*.safetensors")
    batch = task.collate(task.encode(train, model))["batch"]
    with torch.inference_mode(), torch.autocast("cpu", enabled=precision == "bf16"):
        expected = model.eval().encoder(batch, pooled=False).last_hidden_state.float()
    difference = (load_file(vectors)["vectors"] - expected).abs().max()
    plain = model.encoder(batch, pooled=False).last_hidden_state
    assert difference < (1e-5 if precision == "fp32" else 0.5 * (plain - expected).abs().max())


def test_damaged_files_are_an_error(folder, tmp_path):
    task, data = TASKS["tokens"]
    model, train = prepared(folder, task, data)
    examples = task.encode(train, model)
    cached(model, task, examples, tmp_path)
    (made,) = tmp_path.iterdir()
    file = made / "vectors-00000.safetensors"
    whole = file.read_bytes()
    held = load_file(file)["vectors"]
    save_file({"vectors": held[:-1].clone()}, file)
    with pytest.raises(ValueError, match=rf"must hold {len(held)} vectors, got {len(held) - 1}"):
        cached(model, task, examples, tmp_path)
    for damage in (lambda: file.write_bytes(whole[:50]), file.unlink):
        damage()
        with pytest.raises(ValueError, match=r"is corrupt .*remove it, and it is written again"):
            cached(model, task, examples, tmp_path)
    file.write_bytes(whole)
    cached(model, task, examples, tmp_path)
    (made / "manifest.json").unlink()
    with pytest.raises(ValueError, match="is corrupt"):
        cached(model, task, examples, tmp_path)


def test_vectors_that_cannot_be_stored_are_an_error(folder, tmp_path):
    task, data = TASKS["sequences"]
    model, train = prepared(folder, task, data)
    examples = task.encode(train, model)
    with pytest.raises(ValueError, match=r"dtype must be one of .*got torch.int8"):
        cached(model, task, examples, tmp_path, dtype=torch.int8)
    model.encoder.layers[0].up.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen encoder.*call freeze_encoder"):
        cached(model, task, examples, tmp_path)
    embedder = SentenceEmbedder.from_pretrained(folder / "bert")
    freeze_encoder(embedder)
    with pytest.raises(
        ValueError, match=r"must have a head to train .* got SentenceEmbedder without"
    ):
        cached(embedder, task, examples, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_batch_of_features_has_no_other_states(folder):
    encoder = Encoder.from_pretrained(folder / "bert")
    batch = replace(pack_sequences([[5, 6]]), hidden=torch.zeros(2, 32))
    with pytest.raises(ValueError, match="got a batch with hidden: make it without hidden"):
        encoder(batch, output_hidden_states=True)


def test_the_command(folder, tmp_path, capsys):
    train, kept = folder / "train.tsv", tmp_path / "kept"
    command = ("finetune", folder / "bert", train, "--dev", train, "--adapt", "features")
    options = ("--lr", 5e-3, "--epochs", 3, "--feature-cache", kept, "--half-features")
    text = run(*command, "-o", tmp_path / "one", *options)
    head = 32 * 32 + 32 + 32 * 3 + 3
    assert f"training {head:,} of " in text
    (made,) = kept.iterdir()  # one folder: training and evaluation use the same data
    assert json.loads((made / "manifest.json").read_text())["dtype"] == "torch.float16"
    run(*command, "-o", tmp_path / "two", "--max-steps", 2)
    assert (tmp_path / "two" / "features").is_dir()
    run("predict", tmp_path / "one", train, "-o", tmp_path / "labels.tsv")
    metrics = json.loads((tmp_path / "one" / "metrics.json").read_text())
    rows = (tmp_path / "labels.tsv").read_text().splitlines()[1:]
    labels = [line.split("\t")[1] for line in train.read_text().splitlines()[1:]]
    right = sum(row.split("\t")[0] == label for row, label in zip(rows, labels, strict=True))
    assert right / len(labels) == pytest.approx(metrics["accuracy"], abs=0.02)
    plain = ("finetune", folder / "bert", train, "-o", tmp_path / "never")
    for options, message in (
        (("--half-features",), "--half-features need --adapt features, got None"),
        (
            ("--adapt", "features", "--adapt-size", 3),
            "features adds no parameters, got --adapt-size 3",
        ),
        (("--adapt", "features", "--freeze-layers", 1), "leave out --freeze-layers"),
    ):
        assert message in failure(capsys, *plain, *options)
