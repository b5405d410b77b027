import gzip
import json

import pytest

from fastenc.data import EntityData, read_entities, read_unlabelled
from fastenc.data.entities import is_nested
from fastenc.text.tags import Span

GERMAN = """\
Die	O	O
Universität	B-ORG	O
Jena	I-ORG	B-LOC
liegt	O	O

Ada	B-PER	B-PER
Lovelace	I-PER	I-PER
"""
LOC, ORG = Span("LOC", 2, 3), Span("ORG", 1, 3)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "columns", [dict(inner_tag_column=3), dict(tag_column=3, inner_tag_column=2)]
)
def test_two_columns_of_tags_are_nested_entities(tmp_path, columns):
    data = read_entities(write(tmp_path / "a.conll", GERMAN), **columns)
    assert [set(row) for row in data.entities] == [{ORG, LOC}, {Span("PER", 0, 2)}]
    assert len(data.entities[1]) == 1, "an entity of both columns is one"
    assert data.label_names == ["LOC", "ORG", "PER"] and len(data) == 2
    assert [each.words for each in data.sentences][1] == ["Ada", "Lovelace"]
    assert not any(each.tags for each in data.sentences)


def test_one_column_of_tags_is_the_last(tmp_path):
    with pytest.warns(UserWarning, match="column 2 holds entities of the same types"):
        data = read_entities(write(tmp_path / "a.conll", GERMAN))
    assert data.entities == [[LOC], [Span("PER", 0, 2)]]
    bioes = "a S-X\nb B-X\nc E-X\nd O\n\ne O\n"
    data = read_entities(write(tmp_path / "b.conll", bioes))
    assert data.entities == [[Span("X", 0, 1), Span("X", 1, 3)], []]


def test_json_lines(tmp_path):
    rows = [
        {"tokens": ["the", "bank", "of", "China"], "entities": [[1, 4, "ORG"], [3, 4, "LOC"]]},
        {"tokens": ["none"], "entities": []},
    ]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data = read_entities(path, label_names=["ORG", "LOC", "PER"])
    assert data.entities == [[Span("ORG", 1, 4), Span("LOC", 3, 4)], []]
    assert data.label_names == ["ORG", "LOC", "PER"]
    assert data.sentences[0].text == "the bank of China" and data.sentences[1].lines == [2]
    assert read_unlabelled(path).sentences == data.sentences and not read_unlabelled(path).entities


def test_inputs_without_labels(tmp_path):
    (text,) = read_unlabelled(write(tmp_path / "a.txt", "Jena, Ada!\n")).sentences
    assert text.words == ["Jena", ",", "Ada", "!"] and text.starts == [0, 4, 6, 9]
    data = read_unlabelled(write(tmp_path / "a.jsonl", '{"tokens": []}\n{"tokens": ["a"]}\n'))
    assert [each.words for each in data.sentences] == [[], ["a"]] and data.label_names == []
    assert len(read_unlabelled(write(tmp_path / "a.conll", GERMAN))) == 2


def test_nesting():
    assert is_nested([ORG, LOC]) and is_nested([LOC, ORG, Span("X", 0, 1)])
    assert not is_nested([LOC, Span("X", 0, 2), Span("X", 3, 9)]) and not is_nested([])
    assert is_nested([Span("X", 0, 3), Span("X", 2, 5)])


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"tokens": ["a"]}', "line 1: there must be a column 'entities'"),
        (
            '\n{"tokens": [], "entities": []}',
            r"line 2: a sentence must have words, got tokens \[\]",
        ),
        ('{"tokens": ["a", ""], "entities": []}', "line 1: tokens must be a list of words, none"),
        ('{"tokens": "a", "entities": []}', "line 1: tokens must be a list of words, .*got 'a'"),
        ('{"tokens": ["a"], "entities": {}}', "line 1: entities must be a list of .*got {}"),
        ('{"tokens": ["a"], "entities": [[0, 1]]}', r"line 1: an entity must be .*got \[0, 1\]"),
        ('{"tokens": ["a"], "entities": [[0, 1, ""]]}', "line 1: an entity must be"),
        ('{"tokens": ["a"], "entities": [[false, true, "X"]]}', "line 1: an entity must be"),
        (
            '{"tokens": ["a"], "entities": [[0, 2, "X"]]}',
            r"an entity must lie within .* got \[0, 2, 'X'\]",
        ),
        ('{"tokens": ["a"], "entities": [[0, 0, "X"]]}', "end is the index after the last word"),
        ('{"tokens": ["a"], "entities": [[-1, 1, "X"]]}', "must lie within the sentence's 1 words"),
        ('{"tokens": ["a"], "entities": []}', "a.jsonl must hold at least one entity"),
        ('{"tokens": ["a"], ', "line 1: not valid JSON"),
        ("", "a.jsonl must hold rows"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_entities(write(tmp_path / "a.jsonl", text + "\n"))


@pytest.mark.parametrize(
    "text, options, message",
    [
        (
            "a O\nb PER\n",
            {},
            "a.conll, line 2: the tag 'PER' of the word 'b' is neither an IOB2 nor a",
        ),
        ("a B-X\n\nb B-Y\n", dict(label_names=["X"]), r"line 3: the type 'Y' of 'b' is not one of"),
        (
            "a B-X\nb PER\n",
            {},
            "a.conll, line 2: the tag 'PER' of the word 'b' is neither an IOB2 nor a",
        ),
        ("NN\n", {}, "a.conll, line 1: words and tags must be in two columns, got column 1 of 1"),
        ("a O\n", {}, "a.conll must hold at least one entity"),
        ("a B-X\n", dict(inner_tag_column=3), "tag_column must be from 1 to 2"),
        ("a B-X\n", dict(inner_tag_column=1), "tag_column must be from 1 to 2, .*, got 0"),
        (
            "a B-X B-Y\n",
            dict(tag_column=0, inner_tag_column=3),
            "tag_column must be from 1 to 3, .*, got 0",
        ),
        (
            "a O O\nb B-X\n",
            dict(inner_tag_column=3),
            "line 2: each line must have 3 columns as line 1 has, got 2",
        ),
        ("\n", {}, "a.conll holds no sentences"),
    ],
)
def test_bad_columns_are_named(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        read_entities(write(tmp_path / "a.conll", text), **options)


def test_bad_input_without_labels_is_named(tmp_path):
    with pytest.raises(ValueError, match="line 1: tokens must be a list of words"):
        read_unlabelled(write(tmp_path / "a.jsonl", '{"tokens": [1]}\n'))
    with pytest.raises(ValueError, match=r"a\.csv: words are read from files with columns"):
        read_unlabelled(write(tmp_path / "a.csv", "London,B-LOC\n"))
    with pytest.raises(ValueError, match=r"a\.txt holds no words"):
        read_unlabelled(write(tmp_path / "a.txt", "\n"))


def test_germeval(data_dir):
    columns = dict(tag_column=2, inner_tag_column=3)
    data = read_entities(data_dir / "germeval2014_nested" / "train.conll.gz", **columns)
    assert isinstance(data, EntityData) and len(data) == 24_000 and len(data.label_names) == 12
    # The numbers of outer and inner entities in the data set's description.
    assert sum(map(len, data.entities)) == 29_078 + 2_467
    assert any(map(is_nested, data.entities))
