import gzip
import json
import warnings

import pytest

from fastenc.data import read_inputs, read_labelled, read_texts


def write(path, text):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    return path


def test_text_documents_are_separated_by_empty_lines(tmp_path):
    path = write(tmp_path / "a.txt.gz", "= A =\nfirst line\n\n\n= B =\nsecond\n")
    assert read_texts(path) == ["= A =\nfirst line", "= B =\nsecond"]


def test_every_format_gives_the_same_data(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts, labels = ['a "quoted" text', "b, with a comma", "é"], ["no", "yes", "no"]
    rows = list(zip(texts, labels, strict=True))
    tsv = write(tmp_path / "x.tsv", "label\ttext\n" + "".join(f"{y}\t{t}\n" for t, y in rows))
    quoted = lambda t: '"' + t.replace('"', '""') + '"'
    comma = write(
        tmp_path / "x.csv", "text,label\n" + "".join(f"{quoted(t)},{y}\n" for t, y in rows)
    )
    lines = "".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows)
    jsonl = write(tmp_path / "x.jsonl.gz", lines)
    names = datasets.ClassLabel(names=["no", "yes"])
    table = datasets.Dataset.from_dict(
        {"text": texts, "label": [names.str2int(y) for y in labels]},
        features=datasets.Features({"text": datasets.Value("string"), "label": names}),
    )
    table.save_to_disk(str(tmp_path / "saved"))
    for path in (tsv, comma, jsonl, tmp_path / "saved"):
        data = read_labelled(path, text=["text"])
        assert (data.texts, data.labels, data.label_names) == (texts, [0, 1, 0], ["no", "yes"]), (
            path
        )
        assert read_texts(path) == texts


def test_hub_names_reach_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, 0]})
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or table)
    for name in ("org/set", "org/set:validation", "org/set:part:test"):
        assert read_labelled(name).labels == [1, 0]
    assert calls == [
        (("org/set",), {"split": "train"}),
        (("org/set",), {"split": "validation"}),
        (("org/set", "part"), {"split": "test"}),
    ]

    def fail(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"org/set is neither a file.*\(no network\): check"):
        read_labelled("org/set")


def test_saved_data_sets_that_cannot_be_used(tmp_path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match=r"is neither a file, nor a folder written by save_to_disk"
    ):
        read_labelled(tmp_path)
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    table = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [0, -1]}, features)
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"both must hold one split, got \['test', 'train'\]"):
        read_labelled(tmp_path / "both")
    # datasets marks hidden labels with -1.
    with pytest.raises(ValueError, match=r"row 1: column 'label' must hold a label, got None"):
        read_labelled(tmp_path / "both" / "test")
    assert read_texts(tmp_path / "both" / "test", "sentence") == ["a", "b"]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = write(tmp_path / "x.csv", b'\xef\xbb\xbfsentence,label\r\n"a\r\nb",1\r\n\r\nc,0\r\n')
    data = read_labelled(path)
    assert (data.texts, data.labels) == (["a\nb", "c"], [1, 0])


def test_long_values(tmp_path):
    text = "word " * 50_000
    assert read_texts(write(tmp_path / "x.tsv", f"text\n{text}\n")) == [text]
    assert read_texts(write(tmp_path / "x.csv", f"text\n{text}\n")) == [text]
    assert read_texts(write(tmp_path / "x.jsonl", json.dumps({"text": text}) + "\n")) == [text]


def test_pairs_regression_and_numeric_classes(tmp_path):
    path = write(tmp_path / "x.tsv", "a\tb\tlabel\nx\ty\t10\nz\tw\t2\n")
    data = read_labelled(path, text=["a", "b"])
    assert data.texts == [("x", "y"), ("z", "w")]
    assert data.label_names == ["2", "10"] and data.labels == [1, 0]
    assert read_labelled(path, text=["a"], regression=True).labels == [10.0, 2.0]
    assert read_labelled(path, text=["a"], label_names=["10", "2"]).labels == [0, 1]


def test_several_labels_a_text(tmp_path):
    tsv = write(tmp_path / "x.tsv", "sentence\tlabel\na\tred, blue\nb\t\nc\tblue\n")
    rows = [("a", ["red", "blue"]), ("b", []), ("c", ["blue"])]
    jsonl = write(
        tmp_path / "x.jsonl",
        "".join(json.dumps({"sentence": t, "label": y}) + "\n" for t, y in rows),
    )
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["red", "blue"])
    columns = {"sentence": [t for t, _ in rows], "label": [names.str2int(y) for _, y in rows]}
    features = {"sentence": datasets.Value("string"), "label": datasets.Sequence(names)}
    table = datasets.Dataset.from_dict(columns, datasets.Features(features))
    table.save_to_disk(str(tmp_path / "saved"))
    for path in (tsv, jsonl, tmp_path / "saved"):
        data = read_labelled(path, multi_label=True)
        assert data.label_names == ["blue", "red"]
        assert data.labels == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
        data = read_labelled(path, label_names=["red", "green", "blue"], multi_label=True)
        assert data.labels == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    message = r"x.tsv, line 2: label 'red' is not one of the training set's \['blue'\]"
    with pytest.raises(ValueError, match=message):
        read_labelled(tsv, label_names=["blue"], multi_label=True)
    none = write(tmp_path / "none.tsv", "sentence\tlabel\na\t\n")
    with pytest.raises(ValueError, match="column 'label' must hold labels, got none"):
        read_labelled(none, multi_label=True)
    wrong = write(tmp_path / "wrong.jsonl", '{"sentence": "a", "label": 3}\n')
    with pytest.raises(ValueError, match=r"wrong.jsonl, line 1: column 'label' must hold labels"):
        read_labelled(wrong, multi_label=True)


@pytest.mark.parametrize("name", ["x.txt", "x.tsv", "x.csv"])
def test_an_empty_line_of_one_column_is_an_empty_text(tmp_path, name):
    header = "" if name == "x.txt" else "\nsentence\n"
    for end in ("", "\n"):
        path = write(tmp_path / name, f"{header}first\n\nthird{end}")
        assert read_inputs(path) == ["first", "", "third"]
    if header:
        path = write(tmp_path / name, f"{header}first\n\n1")
        with pytest.raises(ValueError, match=rf"{name}, line 4: column 'sentence' must hold a"):
            read_labelled(path, label="sentence")


@pytest.mark.parametrize("name, between", [("x.tsv", "\t"), ("x.csv", ",")])
def test_an_empty_line_of_several_columns_is_no_row(tmp_path, name, between):
    path = write(tmp_path / name, "sentence|label\na|1\n\n|0\n\n".replace("|", between))
    assert read_inputs(path) == ["a", ""] and read_labelled(path).labels == [1, 0]


def test_texts_have_their_places(tmp_path):
    path = write(tmp_path / "x.tsv", "sentence\tlabel\na\t1\n\nb\t0\n")
    for options in ({}, {"regression": True}, {"multi_label": True}):
        assert read_labelled(path, **options).where == [f"{path}, line 2", f"{path}, line 4"]


def test_one_class_is_nothing_to_learn(tmp_path):
    path = write(tmp_path / "x.tsv", "sentence\tlabel\na\tpos\nb\tpos\n")
    with pytest.raises(
        ValueError, match=r"x\.tsv: there must be .* labels to learn, got 'pos' in every row"
    ):
        read_labelled(path)
    assert read_labelled(path, label_names=["neg", "pos"]).labels == [1, 1]
    assert read_labelled(path, multi_label=True).labels == [[1.0], [1.0]]


@pytest.mark.parametrize("labels", [("pos", "pos "), ("Neg", "neg")])
def test_labels_that_differ_by_case_or_spaces_are_named(labels, tmp_path):
    path = tmp_path / "x.tsv"
    write(path, "sentence\tlabel\n" + "".join(f"a\t{label}\n" for label in (*labels, "other")))
    with pytest.warns(
        UserWarning, match=f"x.tsv: the labels {labels[0]!r} and {labels[1]!r} differ"
    ):
        assert read_labelled(path).label_names == sorted((*labels, "other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_labelled(path, label_names=[*labels, "other"])


@pytest.mark.parametrize(
    "name,content,message",
    [
        (
            "x.tsv",
            "sentence\tlabel\na\t1\nb\n",
            r"x.tsv, line 3: a row must have the header's 2 columns, got 1",
        ),
        (
            "x.tsv",
            "text\tlabel\na\t1\n",
            r"x.tsv, line 2: there must be a column 'sentence', got \['text', 'label'\]",
        ),
        ("x.tsv", b"sentence\tlabel\nok\t1\n\xff\t0\n", r"x.tsv, line 3: not UTF-8"),
        ("x.csv", 'sentence,label\n"a"b,1\n', r"x.csv, line 2: "),
        (
            "x.jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": \n',
            r"x.jsonl, line 2: not valid JSON",
        ),
        ("x.jsonl", '["a", 1]\n', r"x.jsonl, line 1: each line must be a JSON object, got list"),
        ("x.jsonl", "[" * 100_000, r"x.jsonl, line 1: not valid JSON"),
        ("x.jsonl", '{"sentence": ' + "9" * 5000 + "}", r"x.jsonl, line 1: not valid JSON"),
        (
            "x.jsonl",
            '{"sentence": 3, "label": 1}\n',
            r"x.jsonl, line 1: column 'sentence' must hold text, got int",
        ),
        (
            "x.jsonl",
            '{"sentence": "a", "label": "0"}\n{"sentence": "a", "label": null}\n',
            r"x.jsonl, line 2: column 'label' must hold a label, got None",
        ),
        (
            "x.jsonl",
            '{"sentence": "a", "label": "0"}\n{"sentence": "a", "label": NaN}\n',
            r"x.jsonl, line 2: column 'label' must hold a label, got nan",
        ),
        (
            "x.jsonl",
            r'{"sentence": "a \ud83d\ude00", "label": 0}'
            "\n"
            r'{"sentence": "b \ud83d", "label": 1}',
            r"x.jsonl, line 2: texts must consist of whole characters, got '\\ud83d', half of one",
        ),
        ("x.tsv", "sentence\tlabel\na\t\n", r"x.tsv, line 2: column 'label' must hold a label"),
        ("x.tsv", "sentence\tlabel\na\t \n", r"x.tsv, line 2: column 'label' must hold a label"),
        (
            "x.csv",
            'sentence,label\n"a\nb",1\nc\n',
            r"x.csv, line 4: a row must have the header's 2 columns",
        ),
        (
            "x.csv",
            'sentence,label\n"a,1\n',
            r"x.csv: the row that begins in line 2 opens a quote and never closes it",
        ),
        ("x.tsv", "label\tlabel\n", r"x.tsv, line 1: columns must have different names"),
        (
            "x.tsv",
            "sentence\tlabel\n",
            r"x.tsv must hold rows, got none: give a table with at least one",
        ),
        ("x.tsv", "", r"x.tsv must hold rows"),
        ("x.csv", "", r"x.csv must hold rows"),
        ("x.jsonl", "\n", r"x.jsonl must hold rows"),
        ("corpus", "a\n", r"corpus: texts are read from .tsv, .csv, .jsonl and .txt files, got an"),
        ("x.conll", "a O\n", r"x.conll: texts are .* \(.conll, .conllu\) are for the tasks token"),
        (
            "x.tsv",
            "sentence\tlabel\na\tmaybe\n",
            r"x.tsv, line 2: label 'maybe' is not one of the training set's \['0', '1'\]: correct it",
        ),
        ("x.txt", "a\n", r"a text file has no columns"),
        (
            "x.parquet",
            "a\n",
            r"x.parquet: texts are read from .*: give one of these, or a data set",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_labelled(path, label_names=["0", "1"])


def test_other_errors(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.tsv is not a file"):
        read_labelled(tmp_path / "nowhere.tsv")
    with pytest.raises(ValueError, match=r"nowhere is neither a file nor a folder: check the path"):
        read_labelled(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"must hold text"):
        read_texts(write(tmp_path / "empty.txt", "\n \n"))
    for value in ("five", "nan"):
        path = write(tmp_path / "x.tsv", f"sentence\tlabel\na\t{value}\n")
        with pytest.raises(
            ValueError,
            match=rf"line 2: a label of a regression or a score must be a number, got '{value}'",
        ):
            read_labelled(path, regression=True)
    plain = write(tmp_path / "plain.tsv", "sentence\tlabel\n" + "a\t1\n" * 5000)
    wrong = tmp_path / "x.tsv.gz"
    wrong.write_bytes(plain.read_bytes())
    with pytest.raises(ValueError, match=r"x.tsv.gz, after line 0: damaged or not gzip"):
        read_labelled(wrong)
    wrong.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    with pytest.raises(ValueError, match=r"x.tsv.gz, after line \d+: damaged or not gzip"):
        read_labelled(wrong)


def test_real_files(data_dir):
    sst2 = read_labelled(data_dir / "sst2" / "dev.tsv.gz")
    assert len(sst2) == 872 and sst2.label_names == ["0", "1"]
    pairs = read_labelled(data_dir / "mrpc" / "dev.tsv.gz", text=["sentence1", "sentence2"])
    assert isinstance(pairs.texts[0], tuple) and set(pairs.labels) == {0, 1}
    scores = read_labelled(
        data_dir / "stsb" / "en_dev.tsv.gz", ["sentence1", "sentence2"], "score", regression=True
    )
    assert len(scores) == 1500 and 0 <= min(scores.labels) < max(scores.labels) <= 5
    books = read_texts(data_dir / "gutenberg" / "books.jsonl.gz")
    assert len(books) == 13 and max(map(len, books)) > 1_000_000
    articles = read_texts(data_dir / "wikipedia_en" / "valid.txt.gz")
    assert len(articles) == 285 and all(article.startswith("= ") for article in articles)


@pytest.mark.parametrize("name", ["t.txt", "t.tsv", "t.csv", "t.jsonl"])
def test_a_file_with_carriage_returns_alone_is_not_read_as_one_line(name, tmp_path):
    (tmp_path / name).write_bytes(b"text\rone\rtwo\rone\r")
    with pytest.raises(ValueError, match=rf"{name}: lines must end with a line feed"):
        read_texts(tmp_path / name)


def test_a_carriage_return_inside_a_text_is_kept(tmp_path):
    (tmp_path / "t.tsv").write_bytes(b"text\r\none\rtwo\r\nthree")
    assert read_texts(tmp_path / "t.tsv") == ["one\rtwo", "three"]
