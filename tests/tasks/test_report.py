"""Figures for each class against scikit-learn and seqeval, and the files of ``fastenc evaluate --report``."""

import csv
import json
from random import Random

import pytest
import torch
from seqeval.metrics import classification_report as entity_report
from sklearn.metrics import classification_report, f1_score
from sklearn.metrics import confusion_matrix as theirs

from fastenc.data import LabelledData
from fastenc.models import EncoderConfig, SequenceClassifier
from fastenc.tasks import SequenceClassification
from fastenc.tasks.report import class_figures, confusion_matrix, entity_figures
from fastenc.text.tags import spans
from tests.helpers.commands import run
from tests.helpers.training_run import small_model, word_tokenizer


def rows_of(lines):
    return list(csv.DictReader(lines, delimiter="\t"))


def same(rows, report):
    for row in rows:
        for ours, name in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert float(row[ours]) == pytest.approx(report[row["class"]][name], abs=5e-5)
        assert int(row["number"]) == report[row["class"]]["support"]


def test_figures_of_classes_are_those_of_scikit_learn():
    draw, names = Random(0), ["a", "b", "c"]
    gold, predicted = ([draw.randrange(3) for _ in range(60)] for _ in range(2))
    report = classification_report(gold, predicted, target_names=names, output_dict=True)
    same(rows_of(class_figures(gold, predicted, names)), report)
    matrix = [line.split("\t") for line in confusion_matrix(gold, predicted, names)]
    assert [row[0] for row in matrix[1:]] == matrix[0][1:] == names
    assert [[int(cell) for cell in row[1:]] for row in matrix[1:]] == theirs(
        gold, predicted
    ).tolist()


def test_figures_of_several_labels_are_those_of_scikit_learn():
    draw, names = Random(1), ["a", "b"]
    gold, predicted = ([[draw.randrange(2) for _ in names] for _ in range(40)] for _ in range(2))
    report = classification_report(
        gold, predicted, target_names=names, output_dict=True, zero_division=0
    )
    same(rows_of(class_figures(gold, predicted, names)), report)


def test_figures_of_entities_are_those_of_seqeval():
    draw, tags = Random(2), ["O", "B-X", "I-X", "B-Y", "I-Y"]
    gold, predicted = (
        [[draw.choice(tags) for _ in range(12)] for _ in range(20)] for _ in range(2)
    )
    ours = rows_of(entity_figures([spans(row) for row in gold], [spans(row) for row in predicted]))
    assert [row["class"] for row in ours] == ["X", "Y"]
    same(ours, entity_report(gold, predicted, output_dict=True, zero_division=0))


def test_a_text_has_the_labels_with_a_probability_of_a_half_or_more():
    """In metrics, files of predictions and reports alike; compared with scikit-learn."""
    names, draw = ["a", "b", "c"], torch.Generator().manual_seed(0)
    config = EncoderConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=1)
    options = {"label_names": names, "problem_type": "multi_label_classification"}
    model, task = SequenceClassifier(config, **options), SequenceClassification(multi_label=True)
    logits = 0.2 * torch.randn(40, 3, generator=draw)
    logits[0] = 0.0
    chosen = (logits.sigmoid() >= 0.5).long().tolist()
    gold = torch.randint(2, (40, 3), generator=draw).tolist()
    gold[1] = chosen[1]
    data = LabelledData([f"text {i}" for i in range(40)], [[*map(float, y)] for y in gold], names)
    assert task.score(model, data, logits)["micro_f1"] == f1_score(gold, chosen, average="micro")
    rows = [json.loads(line) for line in task.lines(model, data, logits, ".jsonl")]
    assert [[int(name in row["labels"]) for name in names] for row in rows] == chosen
    probabilities = torch.tensor([[row[f"p({name})"] for name in names] for row in rows])
    torch.testing.assert_close(probabilities, logits.sigmoid())
    files = task.report(model, data, logits)
    options = dict(target_names=names, output_dict=True, zero_division=0)
    report = classification_report(gold, chosen, **options)
    same(rows_of(files["classes.tsv"]), report)
    mistakes = [json.loads(line) for line in files["mistakes.jsonl"]]
    wrong = [i for i in range(40) if gold[i] != chosen[i]]
    assert 0 < len(wrong) < 40 and [row["where"] for row in mistakes] == [i + 1 for i in wrong]
    for i, row in zip(wrong, mistakes, strict=True):
        assert row["sentence"] == f"text {i}" and row["labels"] == rows[i]["labels"]
        assert row["true"] == [name for name, y in zip(names, gold[i], strict=True) if y]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    small_model("mlm", word_tokenizer()).save_pretrained(folder)
    return folder


TEXTS = ["the cat sat", "a dog ran slowly", "the mat"] * 4


def test_the_command_writes_classes_confusion_and_mistakes(base, tmp_path):
    data, model = tmp_path / "d.tsv", tmp_path / "run"
    labels = ["pos", "neg", "pos"] * 4
    lines = [f"{text}\t{label}" for text, label in zip(TEXTS, labels, strict=True)]
    data.write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    run("finetune", base, data, "-o", model, "--max-steps", 1)
    run("evaluate", model, data, "--report", tmp_path / "r", "-o", tmp_path / "m.json")
    run("predict", model, data, "-o", tmp_path / "p.jsonl")
    predicted = [
        json.loads(line)["label"] for line in (tmp_path / "p.jsonl").read_text().splitlines()
    ]
    report = classification_report(labels, predicted, output_dict=True, zero_division=0)
    same(rows_of((tmp_path / "r" / "classes.tsv").read_text().splitlines()), report)
    wrong = [
        json.loads(line) for line in (tmp_path / "r" / "mistakes.jsonl").read_text().splitlines()
    ]
    expected = [i for i, (y, p) in enumerate(zip(labels, predicted, strict=True)) if y != p]
    assert expected and [row["where"] for row in wrong] == [
        f"{data}, line {i + 2}" for i in expected
    ]
    assert [(row["true"], row["label"]) for row in wrong] == [
        (labels[i], predicted[i]) for i in expected
    ]
    assert (
        (tmp_path / "r" / "confusion.tsv").read_text().startswith("true \\ predicted\tneg\tpos\n")
    )


def test_a_report_needs_no_second_run_of_the_model(base, tmp_path, monkeypatch):
    data, model = tmp_path / "d.tsv", tmp_path / "run"
    data.write_text("sentence\tlabel\nthe cat\tpos\na dog\tneg\nthe mat\tpos\n")
    run("finetune", base, data, "-o", model, "--max-steps", 1)
    batches, forward = [], SequenceClassifier.forward
    counted = lambda self, batch, *given, **named: (
        batches.append(len(batch.cu_seqlens) - 1) or forward(self, batch, *given, **named)
    )
    monkeypatch.setattr(SequenceClassifier, "forward", counted)
    run("evaluate", model, data, "--report", tmp_path / "r", "--batch-size", 2)
    assert sorted(batches) == [1, 2]


@pytest.mark.parametrize("task", ["token-classification", "span-ner"])
def test_words_have_a_report_too(task, base, tmp_path):
    data, model = tmp_path / "d.conll", tmp_path / "run"
    data.write_text("the O\ncat B-X\nsat O\n\na O\ndog B-Y\n\n" * 3)
    run("finetune", base, data, "--task", task, "-o", model, "--max-steps", 1)
    run("evaluate", model, data, "--report", tmp_path / "r")
    rows = rows_of((tmp_path / "r" / "classes.tsv").read_text().splitlines())
    assert {row["class"]: int(row["number"]) for row in rows} == {"X": 3, "Y": 3}
    assert (tmp_path / "r" / "mistakes.jsonl").read_text()
