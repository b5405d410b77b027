"""Predictions in Python and through pipes are the same as those of files."""

import io
import json
import sys

import pytest
import torch
import torch.nn.functional as F

import fastenc
from fastenc.cli import main
from fastenc.models import Encoder
from tests.helpers.commands import failure, run
from tests.helpers.training_run import small_model, word_tokenizer

TEXTS = ["the cat sat", "a dog ran slowly", "the mat"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    small_model("mlm", word_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(base, tmp_path_factory):
    """{task: (model, file of inputs, the same inputs in Python)}."""
    root = tmp_path_factory.mktemp("models")
    labelled = [f"{text}\t{label}" for text, label in zip(TEXTS, ("a", "b", "a"), strict=True)]
    (root / "d.tsv").write_text("\n".join(["sentence\tlabel", *labelled]) + "\n")
    pairs = [("the cat", "the dog"), ("a mat", "a tree")]
    rows = "".join(f"{a}\t{b}\n" for a, b in pairs)
    (root / "pairs.tsv").write_text("sentence1\tsentence2\n" + rows)
    (root / "d.conll").write_text("the O\ncat B-X\n\na O\ndog B-X\n")
    (root / "t.txt").write_text("\n".join(TEXTS) + "\n")
    answer = lambda text: {"text": [text.split()[0]], "answer_start": [0]}
    questions = [
        {"id": str(i), "question": "the cat", "context": text, "answers": answer(text)}
        for i, text in enumerate(TEXTS)
    ]
    (root / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    folders = {}
    for task, data, inputs, values in (
        ("sequence-classification", "d.tsv", "t.txt", TEXTS),
        ("token-classification", "d.conll", "t.txt", TEXTS),
        ("span-ner", "d.conll", "t.txt", TEXTS),
        ("sentence-embedding", "pairs.tsv", "pairs.tsv", pairs),
        ("question-answering", "q.jsonl", "q.jsonl", questions),
    ):
        options = ("--max-steps", 1, *(("--stride", 8) if task == "question-answering" else ()))
        run("finetune", base, root / data, "--task", task, "-o", root / task, *options)
        folders[task] = root / task, root / inputs, values
    return folders


@pytest.mark.parametrize(
    "task",
    [
        "sequence-classification",
        "token-classification",
        "span-ner",
        "sentence-embedding",
        "question-answering",
    ],
)
def test_predictions_in_python_are_those_of_the_file(task, models, tmp_path):
    model, inputs, values = models[task]
    run("predict", model, inputs, "-o", tmp_path / "out.jsonl")
    expected = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    predictor = fastenc.predictor(model)
    assert predictor.predict(values) == expected
    assert predictor.predict([]) == []


def test_words_may_be_given_as_lists(models):
    predictor = fastenc.predictor(models["token-classification"][0])
    (row,) = predictor.predict([["the", "cat"]])
    assert row["words"] == ["the", "cat"] and len(row["tags"]) == 2


def test_what_is_no_input_is_named(models):
    classifier = fastenc.predictor(models["sequence-classification"][0], device="cpu")
    for inputs, message in (
        ("the cat", "inputs must be a list, got a single text: give"),
        (["the cat", None], "input 1 must be a text, got None"),
        ([("a", "b")], "input 0 must be a text, got"),
        (["a", "b \ud83d"], r"input 1: texts must consist of whole characters, got '\\ud83d'"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier.predict(inputs)
    with pytest.raises(ValueError, match="input 0 must be a pair of texts"):
        fastenc.predictor(models["sentence-embedding"][0]).predict(["one"])
    for wrong in ({"sentence": ["one"]}, None):
        with pytest.raises(ValueError, match=f"inputs must be a list, got {type(wrong).__name__}"):
            fastenc.predictor(models["sequence-classification"][0]).predict(wrong)
    with pytest.raises(ValueError, match="crf= is an option of token-classification"):
        fastenc.predictor(models["span-ner"][0], crf=True)
    first, second = ({"question": "who?", "context": text} for text in ("the cat", "a dog"))
    with pytest.raises(ValueError, match="an id of its own, got '1' again at input 1"):
        fastenc.predictor(models["question-answering"][0]).predict([first | {"id": 1}, second])


def test_predict_reads_stdin_and_writes_stdout(models, tmp_path, monkeypatch, capsys):
    model, inputs, _ = models["sequence-classification"]
    run("predict", model, inputs, "-o", tmp_path / "out.jsonl")
    give = lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    give(inputs.read_bytes())
    capsys.readouterr()
    main(["predict", str(model), "-", "-o", "-"])
    assert capsys.readouterr().out == (tmp_path / "out.jsonl").read_text()
    for content, message in (
        (b"", "stdin must hold text"),
        (b"a\n\xff\n", "stdin, line 2: not UTF-8"),
    ):
        give(content)
        assert f"fastenc: {message}" in failure(capsys, "predict", model, "-", "-o", "-")
    text = failure(capsys, "predict", model, "-", "-o", "-", "--resume")
    assert "got stdin or stdout" in text


def test_vectors_as_arrays_and_their_similarity(base):
    encoder = Encoder.from_pretrained(base)
    vectors = encoder.encode(TEXTS, normalize=False)
    array = encoder.encode(TEXTS, normalize=False, convert_to_numpy=True)
    assert array.dtype.name == "float32" and (torch.from_numpy(array) == vectors).all()
    expected = F.cosine_similarity(vectors[:, None], vectors[None], dim=2)
    torch.testing.assert_close(Encoder.similarity(vectors, array), expected)
    assert Encoder.similarity(vectors[0], vectors).shape == (1, 3)
    with pytest.raises(ValueError, match=r"similarity takes vectors, .*: encode texts first"):
        encoder.similarity(TEXTS, vectors)
    with pytest.raises(ValueError, match="vectors of one width, got 2 and"):
        encoder.similarity([1.0, 2.0], vectors)
    with pytest.raises(ValueError, match="encode takes texts, got None as text 1"):
        encoder.encode(["a", None])
    with pytest.raises(
        ValueError, match=r"half a surrogate pair, '\\ud83d', at character 2 of tex"
    ):
        encoder.encode(["a", "b \ud83d"])
