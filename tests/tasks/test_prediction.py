"""Predictions of whole files: parts, and the remains of a killed run."""

import json

import pytest
import torch

from fastenc._base.progress import Counter
from fastenc.data import train_tokenizer
from fastenc.models import EncoderConfig, SequenceClassifier, TokenClassifier
from fastenc.tasks import SequenceClassification, TokenClassification, parts_file, prediction
from fastenc.tasks.prediction import predict_file

TEXTS = [f"{'a good film ' * (i % 5)}number {i}" for i in range(23)]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(prediction, "PART", 5)
    monkeypatch.setattr(parts_file, "SECONDS", 0.0)


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def a_model(model_class):
    tokenizer = train_tokenizer(TEXTS, vocab_size=80)
    config = EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_positions=64,
    )
    model = model_class(config, label_names=["O", "B-x"]).eval()
    model.tokenizer = tokenizer
    return model


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl"])
@pytest.mark.parametrize(
    "task, model_class",
    [(SequenceClassification(), SequenceClassifier), (TokenClassification(), TokenClassifier)],
)
def test_parts_give_what_the_whole_gives(small_parts, inputs, tmp_path, task, model_class, suffix):
    model, output = a_model(model_class), tmp_path / f"out{suffix}"
    assert predict_file(task, model, inputs, output) == len(TEXTS)
    data = task.read_inputs(inputs)
    expected = list(task.lines(model, data, task.predict(model, data), suffix))
    got = output.read_text().splitlines()
    # Other parts make other batches, which changes the last digits, so numbers are compared as numbers.
    assert len(got) == len(expected)
    for one, two in zip(got, expected, strict=True):
        check_line(one, two, suffix)
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, inputs.name]


def test_the_input_is_never_overwritten(inputs):
    before = inputs.read_text()
    with pytest.raises(ValueError, match="the output must not be the input"):
        predict_file(SequenceClassification(), a_model(SequenceClassifier), inputs, inputs)
    assert inputs.read_text() == before


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(
        ValueError, match=r"empty.txt must hold text, got no line: give a file with at least one"
    ):
        predict_file(
            SequenceClassification(),
            a_model(SequenceClassifier),
            tmp_path / "empty.txt",
            tmp_path / "out.tsv",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def check_line(one, two, suffix):
    if suffix == ".jsonl":
        first, second = json.loads(one), json.loads(two)
        assert first.keys() == second.keys()
        for a, b in zip(first.values(), second.values(), strict=True):
            numbers = isinstance(a, float) or (
                isinstance(a, list) and a and isinstance(a[0], float)
            )
            assert a == (pytest.approx(b, abs=2e-6) if numbers else b)
        return
    for a, b in zip(one.split("\t"), two.split("\t"), strict=True):
        try:
            assert float(a) == pytest.approx(float(b), abs=2e-6)
        except ValueError:
            assert a == b


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on_where_it_was(small_parts, inputs, tmp_path, monkeypatch):
    task, model, output = SequenceClassification(), a_model(SequenceClassifier), tmp_path / "o.tsv"
    whole = tmp_path / "whole.tsv"
    predict_file(task, model, inputs, whole)
    predicted = []
    real = SequenceClassification.predict_encoded

    def counted(self, model, data, *rest):
        if len(predicted) == 2:
            predicted.append([])
            raise Killed
        predicted.append(data.texts)
        return real(self, model, data, *rest)

    monkeypatch.setattr(SequenceClassification, "predict_encoded", counted)
    with pytest.raises(Killed):
        predict_file(task, model, inputs, output)
    with open(tmp_path / "o.tsv.part", "a") as file:
        file.write("half a line")  # as if killed before the line was counted
    with pytest.raises(
        ValueError, match="did not finish, with 10 items: continue it with resume=True"
    ):
        predict_file(task, model, inputs, output)
    with pytest.raises(ValueError, match="begun with task="):
        predict_file(SequenceClassification(max_length=9), model, inputs, output, resume=True)
    assert predict_file(task, model, inputs, output, resume=True) == len(TEXTS)
    assert output.read_bytes() == whole.read_bytes()
    assert [text for part in predicted for text in part] == TEXTS
    assert not list(tmp_path.glob("*.part*"))


def test_a_run_that_was_killed_after_its_last_part_repeats_nothing(
    small_parts, inputs, tmp_path, monkeypatch
):
    """The last part has three items of five."""
    task, model, output = SequenceClassification(), a_model(SequenceClassifier), tmp_path / "o.tsv"

    def kill(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(parts_file.PartsFile, "_finish", kill)
        with pytest.raises(Killed):
            predict_file(task, model, inputs, output)
    assert predict_file(task, model, inputs, output, resume=True) == len(TEXTS)
    lines = output.read_text().splitlines()
    data = task.read_inputs(inputs)
    expected = list(task.lines(model, data, task.predict(model, data), ".tsv"))
    for one, two in zip(lines, expected, strict=True):
        check_line(one, two, ".tsv")


@pytest.mark.parametrize("lines", [TEXTS[:7], [*TEXTS, "more"]], ids=["shorter", "longer"])
def test_an_input_that_changes_during_the_run(lines, small_parts, inputs, tmp_path, monkeypatch):
    """Between the first reading, which counts the items, and the second."""

    def change(*arguments):
        inputs.write_text("".join(f"{line}\n" for line in lines))
        return Counter(*arguments)

    monkeypatch.setattr(prediction, "Counter", change)
    output = tmp_path / "o.tsv"
    message = f"must not change while it is read, got {len(lines)} items in place of {len(TEXTS)}"
    with pytest.raises(ValueError, match=message):
        predict_file(SequenceClassification(), a_model(SequenceClassifier), inputs, output)
    assert not output.exists()


@pytest.mark.parametrize("lines", [["another text"], reversed(TEXTS)], ids=["shorter", "as long"])
def test_a_run_is_not_resumed_with_another_input(lines, small_parts, inputs, tmp_path, monkeypatch):
    task, model, output = SequenceClassification(), a_model(SequenceClassifier), tmp_path / "o.tsv"
    real = torch.Tensor.softmax
    calls = []

    def second_part_fails(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return real(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "softmax", second_part_fails)
    with pytest.raises(Killed):
        predict_file(task, model, inputs, output)
    inputs.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match="begun with inputs="):
        predict_file(task, model, inputs, output, resume=True)


def test_a_malformed_line_is_named_before_anything_is_predicted(small_parts, tmp_path, monkeypatch):
    path = tmp_path / "rows.tsv"
    path.write_text("sentence\n" + "fine\n" * 12 + "two\tcells\n")
    monkeypatch.setattr(SequenceClassification, "predict_encoded", None)
    with pytest.raises(ValueError, match="line 14: a row must have the header's 1 columns, got 2"):
        predict_file(
            SequenceClassification(), a_model(SequenceClassifier), path, tmp_path / "out.tsv"
        )
    assert not list(tmp_path.glob("out*"))
