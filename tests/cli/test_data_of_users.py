"""Mistakes in users' data and options, and what a command says about the data that it read."""

import errno
import gzip
import json
import os
import re
import warnings

import numpy as np
import pytest

from fastenc._base.files import write_text_atomically
from fastenc.cli import main
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder, QuestionAnswerer, SentenceEmbedder
from fastenc.tasks import SpanNer
from tests.helpers.commands import failure, run
from tests.helpers.training_run import small_model, word_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with 64 positions."""
    folder = tmp_path_factory.mktemp("base")
    small_model("mlm", word_tokenizer()).save_pretrained(folder)
    return folder


def table(path, rows, header=("sentence", "label")):
    path.write_text("\n".join("\t".join(map(str, row)) for row in [header, *rows]) + "\n")
    return path


ROWS = [("the cat sat", "pos"), ("a dog ran slowly", "neg"), ("the mat", "pos")] * 4


@pytest.mark.parametrize("labels", [[i / 4 for i in range(12)], list(range(12)), [1, 2.5] * 6])
def test_numbers_are_no_classes(labels, base, tmp_path, capsys):
    data = table(tmp_path / "n.tsv", [(row[0], y) for row, y in zip(ROWS, labels, strict=True)])
    command = ("finetune", base, data, "-o", tmp_path / "run", "--max-steps", 1)
    text = failure(capsys, *command)
    assert "give --regression to predict numbers" in text and "give --regression" in text
    assert not (tmp_path / "run").exists()
    run(*command, "--regression")


def test_whole_numbers_that_recur_are_classes(base, tmp_path):
    data = table(tmp_path / "n.tsv", [(row[0], i % 3) for i, row in enumerate(ROWS)])
    run("finetune", base, data, "-o", tmp_path / "run", "--max-steps", 1)


def test_a_column_of_one_tag_is_refused(base, tmp_path, capsys):
    (tmp_path / "tags.conll").write_text("the B-X O\ncat O O\n\na O O\ndog O O\n")
    command = ("finetune", base, tmp_path / "tags.conll", "--task", "token-classification")
    text = failure(capsys, *command, "-o", tmp_path / "run", "--max-steps", 1)
    assert "two different tags to learn, got 'O' for every word: give --tag-column" in text
    run(*command, "-o", tmp_path / "run", "--max-steps", 1, "--tag-column", 2)


def test_a_length_beyond_the_positions_is_refused(base, tmp_path, capsys):
    data = table(tmp_path / "t.tsv", ROWS)
    command = ("finetune", base, data, "-o", tmp_path / "run", "--max-steps", 1)
    message = "--max-length must be at most 64, the model's number of positions, got 5000"
    assert message in failure(capsys, *command, "--max-length", 5000)
    run(*command, "--max-length", 32)
    assert (
        json.loads((tmp_path / "run" / "config.json").read_text())["task_options"]["max_length"]
        == 32
    )
    predict = ("predict", tmp_path / "run", data, "-o", tmp_path / "p.tsv", "--max-length", 5000)
    assert message in failure(capsys, *predict)
    # A task's own default, 512 tokens for words, is no mistake of the user; the saved options have the value that was
    # used.
    (tmp_path / "tags.conll").write_text("the B-X\ncat O\n\na O\ndog B-X\n")
    tags = ("finetune", base, tmp_path / "tags.conll", "--task", "token-classification")
    run(*tags, "-o", tmp_path / "tags", "--max-steps", 1)
    kept = json.loads((tmp_path / "tags" / "config.json").read_text())["task_options"]
    assert kept["max_length"] == 64


def test_entities_of_three_levels_are_read(tmp_path):
    (tmp_path / "n.conll").write_text(
        "the B-A O B-C\ncat I-A B-B B-C\nsat O O O\n\ndog B-A O O\nran O O O\n"
    )
    counts = {
        columns: [
            len(row)
            for row in SpanNer(inner_tag_column=columns).read(tmp_path / "n.conll").entities
        ]
        for columns in (None, 3, (3,), (3, 4))
    }
    assert counts[(3, 4)] == [4, 1] and counts[3] == counts[(3,)] == [2, 1]
    assert SpanNer(inner_tag_column=(3,)).inner_tag_column == 3


def test_levels_of_entities_that_are_not_read_are_reported(tmp_path):
    nested = tmp_path / "nested.conll"
    nested.write_text("New B-LOC O\nYork I-LOC O\nUniversity O B-LOC\n\nin O O\nRome B-LOC O\n")
    with pytest.warns(
        UserWarning, match=r"column 2 .* tag_column=2 and inner_tag_column=\(3,\) to read"
    ):
        SpanNer().read(nested)
    chunks = tmp_path / "chunks.conll"  # as in CoNLL 2003
    chunks.write_text("Rome NNP B-NP B-LOC\nsleeps VBZ B-VP O\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpanNer(inner_tag_column=3).read(nested)
        SpanNer().read(chunks)


def test_messages_say_what_is_wrong_with_the_file(base, tmp_path, capsys):
    (tmp_path / "open.csv").write_text('sentence,label\nfine,pos\n"open,neg\nmore,pos\n')
    text = failure(capsys, "finetune", base, tmp_path / "open.csv", "-o", tmp_path / "x")
    assert "the row that begins in line 3 opens a quote and never closes it" in text
    text = failure(capsys, "predict", tmp_path / "not" / "there", "data.tsv", "-o", "x.tsv")
    assert "is not a folder here: check the path" in text and "Repo id" not in text
    text = failure(capsys, "pretrain", tmp_path / "open.csv", "-o", tmp_path / "open.csv")
    assert "open.csv is a file where a folder has to be: give another path" in text
    text = failure(capsys, "finetune", "--config", tmp_path / "none.toml")
    assert re.search(r"there is no \S+none.toml: check the path", text) and "Errno" not in text


def test_the_data_are_described_before_training(base, tmp_path, capsys):
    data = table(tmp_path / "t.tsv", [*ROWS, ("the cat sat on a mat under the tree", "neg")])
    command = ["finetune", base, data, "--dev", data, "-o", tmp_path / "run", "--max-steps", 6]
    main([*map(str, command), "--max-length", "6"])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[0] == (
        "train: 13 items, 13 sequences of 4 to 6 tokens, median 5; 5 fill all 6, beyond which texts are cut or read "
        "in windows; label: pos 8, neg 5"
    )
    assert lines[1].startswith("dev: 13 items") and lines[2] == "6 optimiser steps"
    assert any(re.match(r"about \d+s left", line) for line in lines)
    best = printed.out.splitlines()[-2]
    assert re.match(
        r"best: step \d by accuracy: loss \d\.\d+  accuracy 0\.\d+  f1 of pos 0\.\d+", best
    )


def test_counts_are_whole_numbers_under_names_that_say_what_they_are(base, tmp_path):
    (tmp_path / "n.conll").write_text("the B-A O\ncat I-A B-B\nsat O O\n\ndog B-A O\nran O O\n" * 3)
    output = run(
        *(
            "finetune",
            base,
            tmp_path / "n.conll",
            "--dev",
            tmp_path / "n.conll",
            "--task",
            "span-ner",
        ),
        *("--inner-tag-column", 3, "-o", tmp_path / "run", "--max-steps", 1),
    )
    assert "entities inside others 3 " in output and "3.0" not in output.split("best:")[1]


def test_a_cut_file_of_questions_is_named_by_every_command(base, tmp_path, capsys):
    cut = tmp_path / "squad.json.gz"
    cut.write_bytes(gzip.compress(json.dumps({"data": [{"paragraphs": []}] * 99}).encode())[:-9])
    head = QuestionAnswerer.from_pretrained(base)
    head.save_pretrained(tmp_path / "qa")
    for command in (
        ("finetune", base, cut, "--task", "question-answering", "-o", tmp_path / "run"),
        ("evaluate", tmp_path / "qa", cut),
        ("predict", tmp_path / "qa", cut, "-o", tmp_path / "answers.json"),
    ):
        assert "squad.json.gz, after line 0: damaged or not gzip" in failure(capsys, *command)


def test_a_folder_without_a_head_is_named(tmp_path, capsys):
    SentenceEmbedder.from_pretrained(minilm_folder()).save_pretrained(tmp_path / "mini")
    data = table(tmp_path / "t.tsv", ROWS)
    (tmp_path / "t.txt").write_text("a text\n")
    for command in (
        ("evaluate", tmp_path / "mini", data),
        ("predict", tmp_path / "mini", data, "-o", tmp_path / "p.tsv"),
        ("predict", tmp_path / "mini", tmp_path / "t.txt", "-o", tmp_path / "p.tsv"),
    ):
        text = failure(capsys, *command)
        assert "mini has no fine-tuned head" in text
        assert "fine-tune it first with fastenc finetune" in text and "fastenc embed" in text
    pairs = table(tmp_path / "pairs.tsv", [("a", "b")], ("sentence1", "sentence2"))
    run("predict", tmp_path / "mini", pairs, "-o", tmp_path / "p.tsv")


@pytest.mark.parametrize("option", ["--batch-size", "--layers"])
def test_a_number_of_twenty_digits_is_refused(option, base, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a text\n")
    command = ("embed", base, tmp_path / "t.txt", "--words", "-o", tmp_path / "v.npy")
    text = failure(capsys, *command, option, "9" * 20)
    assert f"fastenc: {option} must be less than 2^63, got {'9' * 20}: give less" in text


def test_an_option_that_is_nan_is_refused(tmp_path, capsys):
    mine = ("mine", "model", "pairs.tsv", "-o", tmp_path / "out.tsv", "--max-score", "nan")
    assert "fastenc: --max-score must be a number, got nan: give one" in failure(capsys, *mine)


@pytest.mark.parametrize("task", ["sentence-embedding", "sparse-embedding"])
def test_texts_of_no_tokens_are_refused(task, base, tmp_path, capsys):
    data = table(tmp_path / "t.tsv", [("a", "b"), ("c", "d")], ("sentence1", "sentence2"))
    command = ("finetune", base, data, "--task", task, "-o", tmp_path / "run", "--max-length", 0)
    assert "--max-length must be at least 1, got 0" in failure(capsys, *command)


def test_words_of_a_model_with_fewer_layers_than_the_default(base, tmp_path):
    (tmp_path / "t.txt").write_text("the cat\n")
    run("embed", base, tmp_path / "t.txt", "--words", "-o", tmp_path / "v.npy")
    encoder = Encoder.from_pretrained(base)
    states = range(encoder.config.num_layers + 1)
    assert len(states) < 4
    expected = encoder.embed_words([["the", "cat"]], layers=list(states)).vectors
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, rtol=1e-6)


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "metrics.json").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.json'"):
        write_text_atomically(tmp_path / "metrics.json", "new")
    assert (tmp_path / "metrics.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
