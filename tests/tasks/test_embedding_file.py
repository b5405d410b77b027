"""The vectors of whole files: those of ``encode``, whatever the parts, and after a kill."""

import json

import numpy
import pytest
import torch
from safetensors.torch import load_file

from fastenc.models import Encoder
from fastenc.tasks import embedding_file
from fastenc.tasks.embedding_file import embed_file
from tests.helpers.commands import failure, run
from tests.helpers.training_run import documents, small_model, word_tokenizer

TEXTS = [text.replace("\n", " ") for text in documents(25)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    small_model("mlm", word_tokenizer()).save_pretrained(folder)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


def vectors_of(path):
    if path.suffix == ".npy":
        return torch.from_numpy(numpy.load(path))
    return load_file(path)["embeddings"]


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_parts_make_the_vectors_of_encode(suffix, base, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding_file, "PART", 7)
    expected = Encoder.from_pretrained(base).encode(TEXTS)
    run("embed", base, base / "texts.txt", "-o", tmp_path / f"v{suffix}")
    torch.testing.assert_close(vectors_of(tmp_path / f"v{suffix}"), expected, rtol=1e-5, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == [f"v{suffix}"]


def test_a_killed_run_goes_on_where_it_was(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(embedding_file, "PART", 7)
    encoder, output = Encoder.from_pretrained(base), tmp_path / "v.npy"
    embed_file(encoder, base / "texts.txt", tmp_path / "whole.npy")
    real, calls = encoder.encode, []

    def encode(texts, **options):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(texts, **options)

    encoder.encode = encode
    with pytest.raises(KeyboardInterrupt):
        embed_file(encoder, base / "texts.txt", output)
    assert not output.exists()
    with pytest.raises(
        ValueError, match=r"v.npy.part belongs to a run that did not finish: resume it"
    ):
        embed_file(encoder, base / "texts.txt", output)
    with pytest.raises(ValueError, match="begun with options="):
        embed_file(encoder, base / "texts.txt", output, resume=True, pooling="cls")
    calls.clear()
    calls.extend([0] * 3)
    assert embed_file(encoder, base / "texts.txt", output, resume=True) == (25, 32)
    assert calls[3:] == [7, 4], "the first two parts are not computed again"
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_a_run_that_fails_before_its_first_part_leaves_nothing(base, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a text\n")
    command = ("embed", base, tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    assert "--pooling must be one of" in failure(capsys, *command, "--pooling", "none")
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--layers", "-1"), "--layers is for the vectors of words (--words), not of texts"),
        (("--words", "--resume"), "--resume is for the vectors of texts, not of words"),
        (("--words", "--pooling", "cls"), "--pooling is for the vectors of texts, not of words"),
    ],
)
def test_options_without_an_effect_are_refused(options, message, base, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a text\n")
    command = ("embed", base, tmp_path / "t.txt", "-o", tmp_path / "v.npy")
    assert f"fastenc: {message}: leave it out" in failure(capsys, *command, *options)


def test_quoted_values_are_noticed_and_an_option_decides(base, tmp_path, capsys):
    table = tmp_path / "t.tsv"
    table.write_text('sentence\tlabel\n"the ""cat"" sat"\tpos\na dog ran\tneg\n')
    text = failure(capsys, "embed", base, table, "-o", tmp_path / "v.npy")
    assert 't.tsv, line 2: "the ""cat"" sat" is quoted as in CSV: give --quoting csv' in text
    encoder = Encoder.from_pretrained(base)
    for quoting, first in (("csv", 'the "cat" sat'), ("none", '"the ""cat"" sat"')):
        run("embed", base, table, "-o", tmp_path / f"{quoting}.npy", "--quoting", quoting)
        expected = encoder.encode([first, "a dog ran"])
        torch.testing.assert_close(vectors_of(tmp_path / f"{quoting}.npy"), expected)
    train = ("finetune", base, table, "-o", tmp_path / "run", "--max-steps", 1)
    assert "give --quoting csv" in failure(capsys, *train)
    run(*train, "--quoting", "csv")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task_options"]["quoting"]
    run("predict", tmp_path / "run", table, "-o", tmp_path / "p.jsonl")  # as in training
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["sentence"] == (
        'the "cat" sat'
    )
    pretrain = ("pretrain", table, "--column", "sentence", "-o", tmp_path / "x")
    assert "give --quoting csv" in failure(capsys, *pretrain)


def test_a_quote_here_and_there_is_text(base, tmp_path):
    table = tmp_path / "t.tsv"
    table.write_text('sentence\n"quoted" words\nhe said "no"\n"all"\n')
    run("embed", base, table, "-o", tmp_path / "v.npy")
