import json
import random
import statistics
import warnings
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from fastenc.adapt import Lora, add_adaptation
from fastenc.data import EntityData, read_entities, sentence, train_tokenizer
from fastenc.models import Encoder, EncoderConfig, SpanClassifier, TokenClassifier
from fastenc.models.heads.span_classifier import REPRESENTATIONS
from fastenc.tasks import SpanNer
from fastenc.tasks.inference import run_model
from fastenc.text.tags import Span
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.commands import failure, run
from tests.helpers.families import FAMILIES, model, padded_batch

TINY = EncoderConfig(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
PEOPLE, PLACES = ["ada lovelace", "bob", "charles babbage"], ["paris", "new york", "jena"]
VERBS = ["visited", "liked", "remembered", "misunderstood"]
TASK = ("--task", "span-ner")


def example(draw):
    """A person, a verb, and a place or the university that is named after it: a nested entity."""
    words = [*draw.choice(PEOPLE).split()]
    entities = [[0, len(words), "PER"]]
    words.append(draw.choice(VERBS))
    outer = len(words)
    if draw.random() < 0.5:
        words += ["the", "university", "of"]
    place = draw.choice(PLACES).split()
    entities.append([len(words), len(words) + len(place), "LOC"])
    words += place
    if words[outer] == "the":
        entities.append([outer + 1, len(words), "ORG"])
    return {"tokens": [*words, "."], "entities": entities}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("span_ner")
    draw = random.Random(0)
    rows = [example(draw) for _ in range(130)]
    write(folder / "train.jsonl", rows[:100])
    write(folder / "dev.jsonl", rows[100:])
    # A vocabulary of little more than letters, so that words have several subwords.
    tokenizer = train_tokenizer([" ".join(row["tokens"]) for row in rows], vocab_size=60)
    torch.manual_seed(0)
    encoder = Encoder(TINY.replace(vocab_size=60, max_positions=64))
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def untrained(folder):
    """A model that finds entities at random places."""
    torch.manual_seed(1)
    names = ["LOC", "ORG", "PER"]
    model = SpanClassifier.from_pretrained(folder / "encoder", label_names=names)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.head.out.bias[0] -= model.head.out.bias[0] - 1
    return model


def span_arguments(batch):
    """A word at every second token of each sequence, and the spans of up to 3 words."""
    offsets = batch.cu_seqlens.tolist()
    rows, windows, starts, ends = [], [], [], []
    for begin, stop in zip(offsets, offsets[1:], strict=False):
        first = len(rows)
        rows += range(begin, stop, 2)
        for word in range(first, len(rows)):
            windows.append([min(word + k, len(rows) - 1) for k in range(3)])
            for last in range(word, min(word + 3, len(rows))):
                starts.append(word)
                ends.append(last)
    names = ("word_rows", "windows", "starts", "ends")
    return dict(zip(names, map(torch.tensor, (rows, windows, starts, ends)), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_come_from_the_first_subwords_of_every_family(family, tmp_path):
    """Compares the encoder with transformers'; the head has a reference of its own."""
    theirs = model(family)
    ours = SpanClassifier.from_pretrained(save(theirs, tmp_path), label_names=["X", "Y"])
    batch = packed(padded_batch(family))
    mask = padded_batch(family)["attention_mask"].bool()
    arguments = span_arguments(batch)
    with torch.inference_mode():
        states = theirs(**padded_batch(family)).last_hidden_state[mask]
        spans = [arguments[name] for name in ("windows", "starts", "ends")]
        expected = ours.head(states[arguments["word_rows"]], *spans)
        close(ours(batch, **arguments).logits, expected, atol=1e-4)
        labels = torch.randint(3, expected.shape[:1])
        loss = ours(batch, labels, **arguments).loss
    close(loss, torch.nn.functional.cross_entropy(expected, labels), atol=1e-4)


def test_words_are_dropped_before_the_head_in_training_alone():
    """As transformers' heads do it: elements become 0 with the hidden dropout, the others grow."""
    ours = SpanClassifier(TINY.replace(hidden_dropout_p=0.4), label_names=["X"]).train()
    ours.encoder.eval()
    batch = packed(padded_batch("bert"))
    arguments, read = span_arguments(batch), []
    ours.head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    with torch.no_grad():
        words = ours.encoder(batch).last_hidden_state[arguments["word_rows"]]
        ours(batch, **arguments)
        ours.eval()(batch, **arguments)
    kept = read[0] != 0
    close(read[0][kept], words[kept] / 0.6)
    bound = 4 * (0.4 * 0.6 / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - 0.6) < bound
    close(read[1], words)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_what_is_saved_is_loaded(representation, tmp_path):
    options = dict(representation=representation, span_size=7, max_span_words=3)
    options["length_embedding"] = representation != "biaffine"
    ours = SpanClassifier(TINY, label_names=["X", "Y"], nested=False, **options)
    ours.null_offset = 0.25
    ours.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["BertForSpanClassification"]
    assert values["id2label"] == {"0": "X", "1": "Y"}
    assert values["span_classifier"] == {**options, "nested": False, "null_offset": 0.25}
    assert "span_head.project.weight" in load_file(tmp_path / "model.safetensors")
    again = SpanClassifier.from_pretrained(tmp_path)
    assert again.extra_config() == ours.extra_config()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_first_weights_say_none_of_nearly_every_span(representation, tmp_path):
    Encoder(TINY).save_pretrained(tmp_path)
    ours = SpanClassifier.from_pretrained(
        tmp_path, label_names=["X", "Y", "Z"], representation=representation
    )
    batch = packed(padded_batch("bert"))
    logits = ours(batch, **span_arguments(batch)).logits
    none = logits.softmax(1)[:, 0].mean().item()
    assert 0.9 < none < 0.999
    made = SpanClassifier(TINY, label_names=["X", "Y", "Z"], representation=representation)
    for name, parameter in made.head.named_parameters():
        loaded = ours.head.get_parameter(name)
        assert loaded.std().item() == pytest.approx(parameter.std().item(), rel=0.2), name


def test_a_head_of_another_kind_is_an_error(tmp_path):
    SpanClassifier(TINY, label_names=["X"], max_span_words=4).save_pretrained(tmp_path / "spans")
    load = lambda **options: SpanClassifier.from_pretrained(tmp_path / "spans", **options)
    for options, message in (
        (
            dict(representation="biaffine"),
            "must be that of the checkpoint.s head, boundary, got biaffine",
        ),
        (dict(max_span_words=5), "max_span_words must be that of the checkpoint's head, 4, got 5"),
        (dict(label_names=["Z"]), r"head has the labels \['X'\], the data has \['Z'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**options)
    with pytest.raises(
        ValueError, match="spans was fine-tuned for another task: it holds BertForS"
    ):
        TokenClassifier.from_pretrained(tmp_path / "spans")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(representation="mean"), "representation must be one of .* got mean"),
        (dict(span_size=0), "span_size must be at least 1, got 0"),
        (dict(max_span_words=0), "max_span_words must be at least 1, got 0"),
        (dict(representation="biaffine", length_embedding=True), "length_embedding needs the"),
        (dict(decoding="both"), "decoding must be one of flat, nested, got both"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SpanNer(**options)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--representation", "biaffine"),
        ("--representation", "attention", "--length-embedding"),
    ],
    ids=["boundary", "biaffine", "attention"],
)
def test_finetune_predict(folder, options):
    output = folder / f"run{len(options)}"
    text = run(
        *("finetune", folder / "encoder", folder / "train.jsonl", "--dev", folder / "dev.jsonl"),
        *(*TASK, *options, "-o", output, "--lr", 1e-2, "--batch-size", 8, "--max-steps", 80),
        *("--max-span-words", 6, "--eval-every", 80),
    )
    metrics = json.loads((output / "metrics.json").read_text())
    assert "f1" in text and metrics["f1"] > 0.95
    assert metrics["nested_found"] > 0.9 * metrics["nested"] > 5
    stored = json.loads((output / "config.json").read_text())["span_classifier"]
    assert stored["nested"] and stored["null_offset"] == metrics["null_offset"]
    assert stored["max_span_words"] == 6
    run("predict", output, folder / "dev.jsonl", "-o", folder / "dev_found.jsonl")
    rows = [json.loads(line) for line in (folder / "dev_found.jsonl").read_text().splitlines()]
    gold = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    right = predicted = 0
    for row, truth in zip(rows, gold, strict=True):
        assert row["words"] == truth["tokens"]
        entities = {(e["first_word"], e["end_word"], e["type"]) for e in row["entities"]}
        right += len(entities & {tuple(e) for e in truth["entities"]})
        predicted += len(entities)
    expected = sum(len(truth["entities"]) for truth in gold)
    assert metrics["f1"] == pytest.approx(2 * right / (predicted + expected))
    (folder / "texts.txt").write_text(
        "Bob  liked the University of New York.\n\nada visited jena\n"
    )
    run("predict", output, folder / "texts.txt", "-o", folder / "found.jsonl")
    rows = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    assert rows[1] == {"text": "", "words": [], "entities": []}
    named = [(e["type"], e["text"]) for e in rows[0]["entities"]]
    assert named == [("PER", "Bob"), ("ORG", "University of New York"), ("LOC", "New York")]
    for row in rows:
        for entity in row["entities"]:
            assert row["text"][entity["start"] : entity["end"]] == entity["text"]
            assert 0.3 < entity["probability"] <= 1
    run("predict", output, folder / "texts.txt", "-o", folder / "flat.jsonl", "--decoding", "flat")
    row = json.loads((folder / "flat.jsonl").read_text().splitlines()[0])
    places = sorted((e["first_word"], e["end_word"]) for e in row["entities"])
    assert len(places) == 2 and places[0][1] <= places[1][0]
    run("predict", output, folder / "texts.txt", "-o", folder / "no.jsonl", "--null-offset", 1e6)
    assert not any(
        json.loads(x)["entities"] for x in (folder / "no.jsonl").read_text().splitlines()
    )


def test_the_offset_is_the_best_of_the_dev_set(untrained):
    draw, task = random.Random(3), SpanNer()
    sentences = [sentence(example(draw)["tokens"]) for _ in range(12)]
    # The half with the larger margins of the entities that the model finds, except in one sentence.
    predictions = task.predict(untrained, EntityData(sentences, [], []))
    median = statistics.median(each.margin for row in predictions for each in row)
    gold = [[each.entity for each in row if each.margin > median] for row in predictions]
    gold[0] = [Span("LOC", 0, 1)]
    data = EntityData(sentences, gold, untrained.label_names)
    examples = task.encode(data, untrained)
    before = task.evaluate(untrained, data, examples)
    assert untrained.null_offset == 0.0
    chosen = task.calibrate(untrained, data, examples)
    try:
        assert chosen == {
            **task.evaluate(untrained, data, examples),
            "null_offset": untrained.null_offset,
        }
        assert 1 > chosen["f1"] > before["f1"] > 0 and chosen["loss"] == before["loss"]
        for offset in torch.linspace(-median, 3 * median, 25).tolist():
            other = SpanNer(null_offset=offset)
            assert other.evaluate(untrained, data, examples)["f1"] <= chosen["f1"]
            assert other.calibrate(untrained, data, examples) == {}
        assert SpanNer(null_offset=0.0).evaluate(untrained, data, examples) == before
    finally:
        untrained.null_offset = 0.0


def test_predictions_do_not_depend_on_batches(untrained):
    draw, task = random.Random(4), SpanNer(max_length=16)
    rows = [example(draw) for _ in range(7)]
    rows[2:4] = [{"tokens": [], "entities": []}, {"tokens": ["bob"] * 40, "entities": []}]
    data = EntityData([sentence(row["tokens"]) for row in rows], [], [])
    alone = [task.predict(untrained, EntityData([each], [], []))[0] for each in data.sentences]
    together = task.predict(untrained, data, batch_size=3)
    assert [[e.entity for e in row] for row in alone] == [
        [e.entity for e in row] for row in together
    ]
    assert sum(map(len, together)) > 10 and together[2] == []
    for one, two in zip(chain(*alone), chain(*together), strict=True):
        assert one.probability == pytest.approx(two.probability, abs=1e-5)
        assert one.probability > 0 and one.margin > 0


def test_the_logits_of_a_long_sentence_are_those_of_its_windows(untrained):
    draw, task = random.Random(5), SpanNer(max_length=20)
    words = [word for _ in range(8) for word in example(draw)["tokens"]]
    entities = [Span("LOC", i, i + 2) for i in range(0, len(words) - 2, 2)]
    data = EntityData([sentence(words)], [entities], untrained.label_names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        examples = task.encode(data, untrained)
    logits, loss = run_model(untrained, examples, task.collate, task.logits_of, 3)
    assert len(examples) > 5
    losses, count = 0.0, 0
    for each, values in zip(examples, logits, strict=True):
        arguments = task.collate([each])
        with torch.inference_mode():
            output = untrained(**arguments)
        close(values, output.logits, atol=1e-4)
        losses, count = losses + output.loss.item() * len(values), count + len(values)
    assert loss == pytest.approx(losses / count, rel=1e-4)
    # An entity that crosses a window's edge is learnt if some window contains it.
    learnt = {(e.first_word + i, e.first_word + j) for e in examples for i, j, _ in e.labels}
    assert len(learnt) > 0.6 * len(entities)
    edges = {e.first_word for e in examples[1:]}
    assert any(first < edge <= last for first, last in learnt for edge in edges)


@pytest.mark.parametrize("name", ["train.jsonl", "words.conll", "texts.txt"])
def test_inputs_are_read_in_parts(folder, name):
    (folder / "words.conll").write_text("a\nb\n\nc\n\nd\n")
    (folder / "texts.txt").write_text("a b\n\nc\n")
    task = SpanNer()
    whole, parts = task.read_inputs(folder / name), list(task.input_parts(folder / name, 2))
    assert [each for part in parts for each in part.sentences] == whole.sentences
    assert {len(part) for part in parts[:-1]} == {2} and parts[0].path == whole.path


def test_decoding_follows_the_training_set(folder):
    task = SpanNer()
    train = task.read(folder / "train.jsonl")
    assert task.model_options(train)["nested"]
    flat = EntityData(train.sentences, [row[:1] for row in train.entities], train.label_names)
    assert not task.model_options(flat)["nested"]
    assert SpanNer(decoding="nested").model_options(flat)["nested"]
    assert not SpanNer(decoding="flat").model_options(train)["nested"]
    assert task.metrics(train) == ("f1", "precision", "recall", "loss")


@pytest.mark.parametrize(
    "options",
    [
        ("--adapt", "lora", "--adapt-size", 2),
        ("--freeze-layers", 1),
        ("--layer-decay", 0.5),
    ],
    ids=["adapt", "freeze", "decay"],
)
def test_ways_of_training(folder, options, tmp_path):
    run(
        *("finetune", folder / "encoder", folder / "train.jsonl", "--dev", folder / "dev.jsonl"),
        *(*TASK, *options, "-o", tmp_path / "run", "--lr", 1e-2, "--max-steps", 4),
    )
    task = SpanNer()
    again = task.load(tmp_path / "run")
    data = read_entities(folder / "dev.jsonl", label_names=again.label_names)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    measured = task.evaluate(again, data, task.encode(data, again))
    assert measured["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert measured["f1"] == pytest.approx(metrics["f1"])
    before, after = (Encoder.from_pretrained(folder / "encoder"), again.encoder)
    same = torch.equal(before.layers[0].up.weight, after.layers[0].up.weight)
    assert same == (options[0] != "--layer-decay")


def test_only_the_head_and_the_addition_are_trained(folder):
    ours = SpanClassifier.from_pretrained(folder / "encoder", label_names=["X"])
    add_adaptation(ours, Lora(rank=2))
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert {f"head.{name}" for name, _ in ours.head.named_parameters()} < trained
    assert all(name.startswith("head.") or "adaptations." in name for name in trained)


def test_errors_are_one_line(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    start, train = folder / "encoder", folder / "train.jsonl"
    tune = lambda *rest: failure(capsys, "finetune", start, *rest, "-o", folder / "x")
    text = tune(train, "--max-span-words", 3)
    assert "--max-span-words is an option of span-ner, not of sequence-classification" in text
    text = tune(train, *TASK, "--dev", folder / "dev.jsonl", "--metric", "accuracy")
    assert "one of f1, precision, recall, loss, got accuracy" in text
    other = write(folder / "other.jsonl", [{"tokens": ["acme"], "entities": [[0, 1, "FIRM"]]}])
    text = tune(train, *TASK, "--dev", other)
    assert "other.jsonl, line 1: the type 'FIRM' of 'acme' is not one of the training set's" in text
    SpanClassifier.from_pretrained(start, label_names=["X"]).save_pretrained(folder / "spans")
    text = failure(capsys, "predict", folder / "spans", train, "-o", folder / "x.tsv")
    assert "--output must end in .jsonl" in text
