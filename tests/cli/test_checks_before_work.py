"""What commands refuse before they begin, and which of two options counts."""

import errno
import json
import os
from unittest.mock import Mock

import pytest

from fastenc.models import SequenceClassifier
from tests.helpers.commands import failure, run
from tests.helpers.training_run import WORDS, small_model, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An encoder in "base", and 40 labelled texts."""
    folder = tmp_path_factory.mktemp("before")
    small_model("mlm", word_tokenizer()).save_pretrained(folder / "base")
    rows = (f"the {WORDS[1 + number % 4]} sat\t{number % 2}" for number in range(40))
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return folder


def test_a_run_does_not_write_into_the_checkpoint_that_it_trains(folder, capsys):
    before = {path: path.read_bytes() for path in (folder / "base").iterdir()}
    output = ("-o", folder / "base")
    for command in (
        ("finetune", folder / "base", folder / "train.tsv", *output),
        ("finetune", folder / "base", folder / "train.tsv", *output, "--adapt", "lora"),
        ("finetune", folder / "base", folder / "train.tsv", *output, "--overwrite"),
        (
            "pretrain",
            folder / "train.tsv",
            "--text",
            "sentence",
            "--from",
            folder / "base",
            *output,
        ),
    ):
        text = failure(capsys, *command)
        assert "--output must not be the folder of the checkpoint that is trained" in text
    assert {path: path.read_bytes() for path in (folder / "base").iterdir()} == before


def test_a_new_tokenizer_does_not_replace_that_of_a_model(folder, capsys):
    before = {path: path.read_bytes() for path in (folder / "base").iterdir()}
    texts = ("tokenizer", folder / "train.tsv", "--text", "sentence", "--vocab-size", 60)
    text = failure(capsys, *texts, "-o", folder / "base")
    assert "--output must not be the folder of a model" in text
    assert {path: path.read_bytes() for path in (folder / "base").iterdir()} == before


def test_an_output_is_no_input_and_no_folder_that_cannot_be_written(folder, tmp_path, capsys):
    data, ranking = tmp_path / "data.jsonl", tmp_path / "ranking.tsv"
    data.write_text('{"text": "good film", "sentence1": "good film", "sentence2": "bad film"}\n')
    ranking.write_text(data.read_text())
    commands = (
        ("embed", folder / "base", data, "--sparse", "-o", data),
        ("rerank", folder / "base", data, data, "-o", data),
        ("mine", folder / "base", data, "-t", "sentence1", "-t", "sentence2", "-o", data),
        ("mine", folder / "base", ranking, "--corpus", data, "-o", data),
    )
    for command in commands:
        text = failure(capsys, *command)
        assert f"the output must not be the input, got {data} for both" in text
        out = data / "under a file.jsonl"
        assert str(data) in failure(capsys, *command[:-1], out)
    assert data.read_text() == ranking.read_text()


def test_patience_needs_evaluations(folder, tmp_path, capsys):
    train = ("finetune", folder / "base", folder / "train.tsv", "-o", tmp_path / "run")
    text = failure(capsys, *train, "--patience", 2)
    assert "patience=2 counts evaluations, got no data for them: give dev data" in text


def test_the_command_line_stands_above_the_file(folder, tmp_path):
    (tmp_path / "options.toml").write_text("max-steps = 1\n")
    train = ("finetune", folder / "base", folder / "train.tsv")
    run(*train, "-o", tmp_path / "run", "--config", tmp_path / "options.toml", "--epochs", 2)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 4  # 40 texts, 32 a step


def test_a_report_without_classes_is_refused_before_the_model_is_loaded(folder, tmp_path, capsys):
    row = "good film\tbad film\t1\n"
    (tmp_path / "stsb.tsv").write_text(f"sentence1\tsentence2\tscore\n{row}{row}")
    pairs = ("-t", "sentence1", "-t", "sentence2", "--label", "score", "--regression")
    data = tmp_path / "stsb.tsv"
    for name, options in (
        ("sentence-embedding", ("--task", "sentence-embedding", "--similarity", "score")),
        ("a regression", pairs),
    ):
        output = ("-o", tmp_path / name)
        run("finetune", folder / "base", data, *options, *output, "--max-steps", 1)
        (tmp_path / name / "model.safetensors").unlink()
        report = ("--report", tmp_path / "report")
        text = failure(capsys, "evaluate", tmp_path / name, data, *report)
        assert f"{name} has no classes to report on: leave out the report" in text
        assert not (tmp_path / "report").exists()


def test_a_report_is_refused_before_the_work_if_its_folder_cannot_be_written(
    folder, tmp_path, capsys
):
    run("finetune", folder / "base", folder / "train.tsv", "-o", tmp_path / "run", "--max-steps", 1)
    (tmp_path / "run" / "model.safetensors").unlink()
    report = folder / "train.tsv" / "under a file"
    text = failure(capsys, "evaluate", tmp_path / "run", folder / "train.tsv", "--report", report)
    assert str(folder / "train.tsv") in text and "safetensors" not in text


def test_the_folder_of_a_tokenizer_or_of_its_counts_is_tried_before_the_texts_are_read(
    folder, tmp_path, capsys, monkeypatch
):
    texts = ("--language", f"en={tmp_path / 'none.txt'}")
    commands = (("tokenizer", *texts), ("tokens", folder / "base", *texts))
    for command in commands:
        text = failure(capsys, *command, "-o", folder / "train.tsv" / "under a file")
        assert "has a file where a folder has to be: give another path" in text
    refusal = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "tmpabc"))
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=refusal))
    for command in commands:
        text = failure(capsys, *command, "-o", tmp_path)
        assert f"{tmp_path} is on a file system that cannot be written: give another path" in text


def test_options_without_effect_are_refused(folder, tmp_path, capsys):
    text = failure(capsys, "info", "--numerics", "--model", folder / "base")
    assert "--numerics measures ops, not a model: leave out --model" in text
    output = ("-o", tmp_path / "tokenizer")
    text = failure(capsys, "tokenizer", folder / "train.tsv", *output, "--seed", 1)
    assert "--alpha and --seed are for texts of several languages" in text


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_without_sequences_is_refused_before_the_model_is_loaded(
    size, folder, tmp_path, capsys
):
    for command, *options in (
        ("predict", "-o", tmp_path / "out.tsv"),
        ("evaluate", "-o", tmp_path / "out.json"),
        ("embed", "-o", tmp_path / "out.npy"),
        ("embed", "-o", tmp_path / "out.jsonl", "--sparse"),
    ):
        text = failure(
            capsys, command, "none", folder / "train.tsv", *options, "--batch-size", size
        )
        assert f"--batch-size must be at least 1, got {size}: give more" in text
    assert not [*tmp_path.glob("out*")]


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_weights_that_are_not_finite_are_refused(value, folder, tmp_path, capsys):
    model = SequenceClassifier.from_pretrained(folder / "base", label_names=("no", "yes"))
    model.encoder.layers[1].down.weight.data[3, 4] = float(value)
    model.save_pretrained(tmp_path / "nan")
    nan, data = tmp_path / "nan", folder / "train.tsv"
    vectors = ("embed", nan, data, "-o")
    (tmp_path / "words.txt").write_text("the cat sat\n")
    for command in (
        (*vectors, tmp_path / "out.npy"),
        (*vectors, tmp_path / "out.jsonl", "--sparse"),
        ("embed", nan, tmp_path / "words.txt", "-o", tmp_path / "out.npy", "--words"),
        ("predict", nan, data, "-o", tmp_path / "out.tsv"),
        ("evaluate", nan, data, "-o", tmp_path / "out.json"),
        ("rerank", nan, data, data, "-o", tmp_path / "out.tsv"),
    ):
        text = failure(capsys, *command)
        assert f"the weights of {nan} must be numbers, got NaN or infinity in " in text
        assert "layers.1.down.weight: " in text
    assert not [*tmp_path.glob("out*")]


def test_the_smoothing_of_languages_is_checked_before_texts_are_read(folder, tmp_path, capsys):
    output = ("-o", tmp_path / "out")
    of_language = ("tokenizer", "--language", f"en={tmp_path / 'none.txt'}", *output)
    for command in (of_language, ("pretrain", tmp_path / "none.txt", *output)):
        text = failure(capsys, *command, "--alpha", 2)
        assert "--alpha must be in [0, 1], got 2.0" in text
    text = failure(capsys, "pretrain", folder / "train.tsv", *output, "--alpha", 0.7)
    assert "--alpha is for the languages of a store, got 0.7" in text
