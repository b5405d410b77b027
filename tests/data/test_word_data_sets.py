"""Tagged words and entities from data sets: as from a file with the same words and tags."""

import pytest

from fastenc.data import read_entities, read_tagged, read_words, train_tokenizer
from fastenc.tasks import Predictor
from tests.helpers.commands import run
from tests.helpers.training_run import small_model

datasets = pytest.importorskip("datasets")

TOKENS = [["Ann", "lives", "in", "New", "York"], ["Bob"], [], ["He", "left"]]
TAGS = [["B-PER", "O", "O", "B-LOC", "I-LOC"], ["B-PER"], [], ["O", "O"]]
PARTS = [["N", "V", "P", "N", "N"], ["N"], [], ["P", "V"]]


def saved(folder, columns, classes=()):
    """A data set with these columns. classes: those that hold numbers of classes."""
    features, values = {}, {}
    for name, rows in columns.items():
        kind = datasets.Value("string")
        if name in classes:
            kind = datasets.ClassLabel(names=sorted({each for row in rows for each in row}))
            rows = [[kind.str2int(each) for each in row] for row in rows]
        features[name], values[name] = datasets.Sequence(kind), rows
    table = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    table.save_to_disk(str(folder))
    return folder


@pytest.fixture
def conll2003(tmp_path):
    """A data set with the columns of conll2003."""
    columns = {"tokens": TOKENS, "pos_tags": PARTS, "ner_tags": TAGS}
    return saved(tmp_path / "saved", columns, classes=("pos_tags", "ner_tags"))


@pytest.fixture
def file(tmp_path):
    lines = [
        "\n".join(map("\t".join, zip(*rows, strict=True)))
        for rows in zip(TOKENS, PARTS, TAGS, strict=True)
    ]
    (tmp_path / "file.conll").write_text("\n\n".join(lines))
    return tmp_path / "file.conll"


def without_lines(data):
    return [each._replace(lines=[]) for each in data.sentences]


def test_words_and_tags_are_those_of_a_file(conll2003, file):
    for options in ({}, {"tag_column": 2}, {"tag_scheme": "bioes"}):
        ours, expected = (read_tagged(path, **options) for path in (conll2003, file))
        assert without_lines(ours) == without_lines(expected)
        assert ours.label_names == expected.label_names
    assert [set(each.lines) for each in ours.sentences] == [{0}, {1}, {3}]
    assert without_lines(read_words(conll2003)) == without_lines(read_words(file))
    ours, expected = (read_entities(path) for path in (conll2003, file))
    assert (ours.entities, ours.label_names) == (expected.entities, expected.label_names)


def test_columns_without_a_tag_for_each_word_are_left_out(tmp_path, file):
    """As wikiann has them: a language for each word, and spans, of which a sentence may have as many as words."""
    languages = [["en"] * len(row) for row in TOKENS]
    spans = [["PER: Ann", "LOC: New York"], ["PER: Bob"], [], []]
    columns = {"spans": spans, "words": TOKENS, "labels": TAGS, "langs": languages}
    path = saved(tmp_path / "saved", columns)
    assert without_lines(read_tagged(path)) == without_lines(read_tagged(file))
    assert read_tagged(path, tag_column=2).label_names == ["en"]
    with pytest.raises(ValueError, match=r"row 0: tag_column must be from 1 to 3"):
        read_tagged(path, tag_column=4)


def test_what_is_refused(tmp_path, conll2003):
    with pytest.raises(
        ValueError, match=r"row 0: the words must be in a column .*, got \['text'\]"
    ):
        read_tagged(saved(tmp_path / "a", {"text": TOKENS}))
    with pytest.raises(ValueError, match=r"row 0: words and tags must be in two columns"):
        read_tagged(saved(tmp_path / "b", {"tokens": TOKENS}))
    with pytest.raises(ValueError, match=r"row 3: column 1 must hold a word, got nothing"):
        read_words(saved(tmp_path / "c", {"tokens": [*TOKENS[:3], ["", "x"]]}))
    short = {"tokens": TOKENS, "pos_tags": PARTS, "ner_tags": [*TAGS[:3], ["O"]]}
    with pytest.raises(ValueError, match=r"row 3: column 'ner_tags' must have a tag for each of"):
        read_tagged(saved(tmp_path / "e", short))
    numbers = datasets.Dataset.from_dict({"tokens": [1, 2]})
    numbers.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match=r"row 0: the words must be a list of texts, got 1"):
        read_words(tmp_path / "d")
    with pytest.raises(ValueError, match=r"row 0: the tag 'B-PER' of the word 'Ann' is not one of"):
        read_tagged(conll2003, label_names=["O", "B-LOC", "I-LOC"])
    with pytest.raises(ValueError, match=r"row 0: the type 'PER' of 'Ann' is not one of"):
        read_entities(conll2003, label_names=["LOC"])


def test_names_on_the_hub_reach_datasets(monkeypatch, conll2003):
    table, calls = datasets.load_from_disk(str(conll2003)), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or table)
    assert len(read_tagged("eriktks/conll2003:validation")) == 3
    assert set(map(str, calls)) == {"(('eriktks/conll2003',), {'split': 'validation'})"}


@pytest.mark.parametrize("task", ["token-classification", "span-ner"])
def test_commands_take_a_data_set(task, conll2003, tmp_path):
    base, out = tmp_path / "base", tmp_path / "model"
    tokenizer = train_tokenizer([" ".join(words) for words in TOKENS], vocab_size=100)
    small_model("mlm", tokenizer).save_pretrained(base)
    options = ("--task", task, "--max-steps", 1, "--batch-size", 2)
    run("finetune", base, conll2003, "--dev", conll2003, "-o", out, *options)
    assert "f1" in run("evaluate", out, conll2003)
    run("predict", out, conll2003, "-o", tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    assert len(Predictor(out).predict(TOKENS)) == 4
