import json
import random
import warnings

import pytest
import torch

from fastenc.data import TaggedData, read_tagged, sentence, train_tokenizer
from fastenc.models import Encoder, EncoderConfig, TokenClassifier
from fastenc.packing import pack_sequences
from fastenc.tasks import TokenClassification
from fastenc.tasks.metrics import tagging_metrics
from fastenc.text.tags import convert
from tests.helpers.commands import failure, run

NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
PEOPLE, PLACES = ["ada lovelace", "bob", "charles babbage", "grace hopper"], ["paris", "new york"]
VERBS = ["visited", "liked", "remembered", "misunderstood"]


def example(draw):
    words, tags = [], []
    for entity_type, text in (
        ("PER", draw.choice(PEOPLE)),
        ("", draw.choice(VERBS)),
        ("LOC", draw.choice(PLACES)),
    ):
        for place, word in enumerate(text.split()):
            words.append(word)
            tags.append(f"{'BI'[place > 0]}-{entity_type}" if entity_type else "O")
    return [*words, "."], [*tags, "O"]


def columns(sentences):
    return "\n".join("".join(f"{w} {t}\n" for w, t in zip(*s, strict=True)) for s in sentences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagging")
    draw = random.Random(0)
    sentences = [example(draw) for _ in range(120)]
    (folder / "train.conll").write_text(columns(sentences[:100]))
    (folder / "dev.conll").write_text(columns(sentences[100:]))
    torch.manual_seed(0)
    # A vocabulary of little more than letters, so that words have several subwords.
    tokenizer = train_tokenizer([" ".join(words) for words, _ in sentences], vocab_size=60)
    config = EncoderConfig(
        vocab_size=60,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_positions=64,
    )
    encoder = Encoder(config)
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def untrained(folder):
    """A model that predicts tags at random."""
    torch.manual_seed(1)
    model = TokenClassifier.from_pretrained(folder / "encoder", label_names=NAMES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


TASK = ("--task", "token-classification")


@pytest.mark.parametrize("options", [(), ("--crf", "--tag-scheme", "bioes")])
def test_finetune_predict(folder, options):
    seqeval = pytest.importorskip("seqeval.metrics")
    output = folder / f"run{len(options)}"
    text = run(
        *("finetune", folder / "encoder", folder / "train.conll", "--dev", folder / "dev.conll"),
        *(*TASK, *options, "-o", output, "--lr", 1e-2, "--batch-size", 8, "--max-steps", 60),
        *("--eval-every", 60),
    )
    metrics = json.loads((output / "metrics.json").read_text())
    assert "f1" in text and metrics["f1"] > 0.9
    run("predict", output, folder / "dev.conll", "-o", folder / "tags.tsv")
    gold = [each.tags for each in read_tagged(folder / "dev.conll").sentences]
    again = read_tagged(folder / "tags.tsv")
    predicted = [each.tags for each in again.sentences]
    if options:
        assert predicted == [convert(tags, "bioes") for tags in predicted], (
            "the scheme allows every tag"
        )
        gold = [convert(tags, "bioes") for tags in gold]
    assert metrics["f1"] == pytest.approx(seqeval.f1_score(gold, predicted))
    assert metrics["precision"] == pytest.approx(seqeval.precision_score(gold, predicted))
    assert metrics["recall"] == pytest.approx(seqeval.recall_score(gold, predicted))
    assert [each.words for each in again.sentences] == [
        each.words for each in read_tagged(folder / "dev.conll").sentences
    ]
    (folder / "texts.txt").write_text("Ada Lovelace  liked New York.\n\nbob visited paris .\n")
    run("predict", output, folder / "texts.txt", "-o", folder / "tags.jsonl")
    rows = [json.loads(line) for line in (folder / "tags.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [
        "Ada Lovelace  liked New York.",
        "",
        "bob visited paris .",
    ]
    assert rows[1] == {"text": "", "words": [], "tags": [], "confidences": [], "entities": []}
    entities = [(e["type"], e["text"]) for row in rows for e in row["entities"]]
    assert entities == [
        ("PER", "Ada Lovelace"),
        ("LOC", "New York"),
        ("PER", "bob"),
        ("LOC", "paris"),
    ]
    for row in rows:
        for entity in row["entities"]:
            assert row["text"][entity["start"] : entity["end"]] == entity["text"]
            assert 0 < entity["confidence"] <= 1


def test_parts_of_speech_have_accuracy_alone(folder):
    line = lambda i, word: f"{i}\t{word}\t_\t{'VERB' if word in VERBS else 'X'}" + "\t_" * 6
    sentences = read_tagged(folder / "dev.conll").sentences
    rows = ("\n".join(line(i, w) for i, w in enumerate(each.words, 1)) for each in sentences)
    path = folder / "dev.conllu"
    path.write_text("\n\n".join(rows) + "\n")
    task = TokenClassification()
    data = task.read(path)
    assert data.label_names == ["VERB", "X"] and task.metrics(data) == ("accuracy", "loss")
    model = task.load(folder / "encoder", data)
    metrics = task.evaluate(model, data, task.encode(data, model))
    predicted = task.predict(model, data)
    pairs = [
        (a, b)
        for p, s in zip(predicted, data.sentences, strict=True)
        for a, b in zip(p.tags, s.tags, strict=True)
    ]
    assert metrics.keys() == {"accuracy", "loss"}
    assert metrics["accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    (line, *_) = task.lines(model, data, predicted, ".jsonl")
    assert json.loads(line).keys() == {"text", "words", "tags", "confidences"}


@pytest.mark.parametrize("aggregation", ["first", "mean"])
def test_entities_are_those_of_transformers_pipeline(folder, untrained, aggregation):
    from transformers import pipeline

    untrained.save_pretrained(folder / "untrained")
    theirs = pipeline(
        "token-classification",
        str(folder / "untrained"),
        aggregation_strategy={"first": "first", "mean": "average"}[aggregation],
    )
    task, draw = TokenClassification(aggregation=aggregation), random.Random(1)
    texts = [" ".join(example(draw)[0]) for _ in range(10)]
    data = TaggedData([sentence(text.split()) for text in texts], [])
    lines = task.lines(untrained, data, task.predict(untrained, data), ".jsonl")
    number = 0
    for text, line in zip(texts, lines, strict=True):
        ours, expected = json.loads(line)["entities"], theirs(text)
        number += len(expected)
        assert [(e["type"], e["start"], e["end"]) for e in ours] == [
            (e["entity_group"], e["start"], e["end"]) for e in expected
        ]
        for one, two in zip(ours, expected, strict=True):
            assert one["confidence"] == pytest.approx(float(two["score"]), abs=1e-5)
    assert number > 10


def test_a_long_documents_tokens_come_from_their_most_central_windows(untrained):
    words = [word for _ in range(12) for word in example(random.Random(2))[0]]
    data = TaggedData([sentence(words)], [])
    task, room = TokenClassification(max_length=12), 10
    (whole,) = TokenClassification(max_length=10**6).encode(
        TaggedData([sentence(words[:8])], []), untrained
    )
    special = whole.input_ids[0], whole.input_ids[-1]
    ids = [
        i for e in task.encode(data, untrained) for i in e.input_ids[e.first :][: len(e.word_ids)]
    ]
    word_ids = [w for e in task.encode(data, untrained) for w in e.word_ids]
    starts = [*range(0, len(ids) - room, room // 2), len(ids) - room]
    best = [(-1, None)] * len(ids)
    for start in starts:
        window = [special[0], *ids[start : start + room], special[1]]
        with torch.inference_mode():
            logits = untrained(pack_sequences([window])).logits[1:-1]
        for i in range(room):
            centrality = min(i, room - 1 - i)
            if centrality > best[start + i][0]:
                best[start + i] = centrality, logits[i]
    first = [word_ids.index(word) for word in range(len(words))]
    chances = torch.stack([best[i][1] for i in first]).softmax(1)
    (predicted,) = task.predict(untrained, data)
    assert predicted.tags == [NAMES[tag] for tag in chances.argmax(1).tolist()]
    torch.testing.assert_close(torch.tensor(predicted.confidences), chances.amax(1))


def test_every_word_keeps_a_prediction_whatever_the_batches(untrained):
    draw = random.Random(3)
    sentences = [sentence(example(draw)[0]) for _ in range(9)]
    sentences[4:6] = [sentence([]), sentence(["\u200b"])]
    data = TaggedData(sentences, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        task = TokenClassification(max_length=16)
        alone = [task.predict(untrained, TaggedData([each], []))[0] for each in sentences]
        together = task.predict(untrained, data, batch_size=4)
    assert [len(p.tags) for p in together] == [len(each.words) for each in sentences]
    assert [p.tags for p in alone] == [p.tags for p in together]
    for one, two in zip(alone, together, strict=True):
        assert one.confidences == pytest.approx(two.confidences, abs=1e-5)


def test_metrics_of_windows_count_every_word_once(folder, untrained):
    task = TokenClassification(max_length=8)
    data = task.read(folder / "dev.conll")
    examples = task.encode(data, untrained)
    assert len(examples) > len(data)
    metrics = task.evaluate(untrained, data, examples, 7)
    tokens, losses = 0, 0.0
    with torch.no_grad():
        for each in examples:
            arguments = task.collate([each])
            count = int((arguments["labels"] != -100).sum())
            tokens, losses = tokens + count, losses + untrained(**arguments).loss.item() * count
    assert tokens == sum(len(each.words) for each in data.sentences)
    assert metrics["loss"] == pytest.approx(losses / tokens, rel=1e-4)


def test_metrics_are_seqevals():
    seqeval = pytest.importorskip("seqeval.metrics")
    draw = random.Random(0)
    gold, predicted = ([draw.choices(NAMES, k=9) for _ in range(20)] for _ in range(2))
    metrics = tagging_metrics(predicted, gold, entities=True)
    assert metrics["f1"] == seqeval.f1_score(gold, predicted) > 0
    assert metrics["precision"] == seqeval.precision_score(gold, predicted)
    assert metrics["recall"] == seqeval.recall_score(gold, predicted)
    none = tagging_metrics([["O"]], [["O"]], entities=True)
    assert none == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tag_scheme="iob1"), "tag_scheme must be one of iob2, bioes, got iob1"),
        (dict(aggregation="max"), "aggregation must be one of first, mean, got max"),
        (
            dict(crf=True, label_scheme="all"),
            "label_scheme must be first with a CRF, .* got all",
        ),
        (dict(crf=True, aggregation="mean"), "aggregation must be first with a CRF, .* got mean"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TokenClassification(**options)


def test_errors_are_one_line(folder, untrained, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    start, train, dev = folder / "encoder", folder / "train.conll", folder / "dev.conll"
    tune = lambda *rest: failure(capsys, "finetune", start, *rest, "-o", folder / "x")
    text = tune(train, "--crf")
    assert "--crf is an option of token-classification, not of sequence-classification" in text
    text = tune(train, *TASK, "--dev", dev, "--metric", "mcc")
    assert "one of f1, precision, recall, accuracy, loss, got mcc" in text
    (folder / "other.conll").write_text("bob B-PER\n\nacme B-ORG\n")
    text = tune(train, *TASK, "--dev", folder / "other.conll")
    assert "other.conll, line 3: the tag 'B-ORG' of the word 'acme' is not one of" in text
    (folder / "empty.conll").write_text("\n\n")
    assert "empty.conll holds no sentences" in tune(folder / "empty.conll", *TASK)
    untrained.save_pretrained(folder / "untrained")
    (folder / "table.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    text = failure(
        capsys, "finetune", folder / "untrained", folder / "table.tsv", "-o", folder / "x"
    )
    assert "untrained was fine-tuned for another task: it holds BertForTokenClassification" in text
    text = failure(capsys, "predict", folder / "untrained", dev, "-o", folder / "x.tsv", "-t", "a")
    assert (
        "--text is an option of sequence-classification, sentence-embedding, sparse-embedding, not of token-"
        in text
    )
