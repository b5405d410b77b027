"""The page of figures: what is in it, that it stands alone, and the data beside it."""

import csv
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from fastenc.analysis import (
    ScoredPairs,
    StaticVectors,
    analyze,
    compare_analogies,
    correlation_by_layer,
    find_data,
    isolated_vectors,
    labelled_words,
    learn_mix,
    read_analogies,
    similarity_by_frequency,
    vectors_by_layer,
)
from fastenc.analysis.data_files import names_of, train_and_test
from fastenc.analysis.figures import INK, bars, by_layer, heat_maps, scatter
from fastenc.analysis.probes import LabelledWords
from fastenc.analysis.report import write_report
from fastenc.data import train_tokenizer
from fastenc.models import Encoder
from tests.helpers.commands import failure, run
from tests.helpers.families import model

SENSES = [
    ("bank", 1, "river", "the bank of a river"),
    ("bank", 2, "river", "a muddy bank"),
    ("bank", 1, "money", "the bank lends money"),
    ("bank", 1, "money", "a bank of money & <gold>"),
    ("spring", 1, "season", "the spring is warm"),
]
TREE = """1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\t{noun}\tx\tNOUN\tNN\t_\t3\tnsubj\t_\t_
3\t{verb}\tx\tVERB\tVBZ\t_\t0\troot\t_\t_

"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    nouns, verbs = ("bank", "river", "spring", "money"), ("is", "lends", "sleeps")
    texts = [row[3] for row in SENSES] + [" ".join((*nouns, *verbs))]
    tokenizer = train_tokenizer(texts, vocab_size=80)
    model("bert", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(folder)
    return encoder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = ["word\tindex\tsense\tsentence", *("\t".join(map(str, row)) for row in SENSES)]
    (folder / "senses.tsv").write_text("\n".join(lines))
    for name in ("train", "dev"):
        trees = [
            TREE.format(noun=noun, verb=verb)
            for noun in ("bank", "river", "spring")
            for verb in ("is", "lends", "sleeps")
        ]
        (folder / f"{name}.conllu").write_text("".join(trees))
    pairs = "word1\tword2\tscore\nbank\triver\t3\nbank\tmoney\t4\nspring\triver\t1\n"
    (folder / "words.tsv").write_text(pairs)
    for name in ("train", "dev"):
        (folder / f"{name}.conll").write_text("the O\nbank B-ORG\nof O\nmoney B-PER\n\n" * 3)
    (folder / "notes.txt").write_text("nothing to analyse")
    return folder


def test_the_page_has_every_figure_and_needs_no_other_file(encoder, data, tmp_path):
    output = tmp_path / "report.html"
    text = run("analyze", encoder.base, data, "-o", output, "--word", "bank")
    names = [
        "map",
        "neighbours",
        "anisotropy",
        "frequency",
        "similarity",
        "heads",
        "relations",
        "probes",
        "mix",
    ]
    assert f"{len(names)} figures in" in text
    page = output.read_text()
    assert re.findall(r'<section id="(\w+)">', page) == names
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page), "nothing is fetched"
    assert "prefers-color-scheme: dark" in page and INK not in page
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    ids = re.findall(r'\bid="(\w+)"', page)
    assert len(set(ids)) == len(ids), "figures share no ids"
    for svg in svgs:
        ElementTree.fromstring(svg)
        assert "currentColor" in svg
    for name in names:
        with open(tmp_path / "report_data" / f"{name}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert rows and all(len(row) == len(header) for row in rows)
    with open(tmp_path / "report_data" / "map.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows] == ["river", "river", "money", "money"]
    with open(tmp_path / "report_data" / "relations.csv", newline="") as file:
        found = {row["label"].split(",")[0]: row for row in csv.DictReader(file)}
    assert float(found["det"]["best fixed distance"]) == 1.0
    with open(tmp_path / "report_data" / "probes.csv", newline="") as file:
        header = next(csv.reader(file))
    probed = [name.split(" (majority")[0] for name in header[1::2]]
    assert probed == ["part of speech", "relation", "entity", "sense"]
    with open(tmp_path / "report_data" / "neighbours.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sense"] for row in rows] == ["money", "money", "river", "river"]
    assert rows[1]["sentence"] == "a [bank] of money & <gold>"
    assert len({row["neighbours of the static vector"] for row in rows}) == 1
    assert "a [bank] of money &amp; &lt;gold&gt;" in page


def test_only_what_the_data_allow(encoder, data, tmp_path):
    (tmp_path / "words.tsv").write_text((data / "words.tsv").read_text())
    assert [figure.name for figure in analyze(encoder, tmp_path)] == ["similarity"]
    found = find_data(data)
    assert [path.name for path in found.trees] == ["dev.conllu", "train.conllu"]
    counts = [len(paths) for paths in vars(found).values()]
    assert counts == [1, 2, 2, 1, 0, 0]


def test_files_of_several_corpora(tmp_path):
    paths = [
        tmp_path / name for name in ("a/test.tsv", "a/train.tsv", "b/dev.tsv", "b/train.tsv.gz")
    ]
    assert train_and_test(paths) == [paths[1], paths[0]]
    assert train_and_test(paths[2:3]) == paths[2:3] and train_and_test([]) == []
    assert names_of(paths) == ["test", "a/train", "dev", "b/train"]


def test_what_probes_learn(data, tmp_path):
    found = labelled_words(find_data(data), 100)
    train, test = found["entity"]
    assert train.labels[0] == [None, "ORG", None, "PER"] and train.sentences == test.sentences
    train, test = found["sense"]  # one file: every second sentence
    rows = [0, 2, 4], [1, 3]
    for part, chosen in zip((train, test), rows, strict=True):
        assert part.sentences == [SENSES[i][3].split() for i in chosen]
        for i, labels, keys in zip(chosen, part.labels, part.control_keys, strict=True):
            word, index, sense, _ = SENSES[i]
            assert labels[index] == f"{word}: {sense}" and keys[index].endswith(f" {word}")
            assert sum(each is not None for each in labels) == 1
    assert [len(part.sentences) for part in labelled_words(find_data(data), 2)["relation"]] == [
        2,
        2,
    ]
    (tmp_path / "train.conll").write_text("the O\nbank B-ORG\n\n")
    assert not labelled_words(find_data(tmp_path), 100), "one type alone is nothing to tell apart"


def test_analogies_by_both_kinds_of_vectors(encoder, tmp_path):
    """Against the enumeration of all candidates; a word is looked up in lower case where it must be."""
    questions = ": nouns\nBank river spring money\nriver bank money spring\nbank river emu spring\n"
    (tmp_path / "questions.txt").write_text(questions + ": missing\nemu bank river spring\n")
    words = ["bank", "money", "river", "spring"]
    static = StaticVectors.of(words, torch.tensor([[1.0, 0], [0, 1], [1, 0.2], [0.1, 1]]))
    found = compare_analogies(encoder, static, read_analogies(tmp_path / "questions.txt"))
    assert set(found) == {"nouns"} and found["nouns"][2:] == (2, 3)

    def answered(vectors):
        unit = {w: v / np.linalg.norm(v) for w, v in zip(words, vectors, strict=True)}
        right = 0
        for a, b, c, d in (
            ("bank", "river", "spring", "money"),
            ("river", "bank", "money", "spring"),
        ):
            score = lambda w, a=a, b=b, c=c: unit[w] @ (unit[b] - unit[a] + unit[c])
            right += max((w for w in words if w not in (a, b, c)), key=score) == d
        return right / 2

    assert found["nouns"].static == answered(static[words].numpy())
    layers = [encoder.embed_words([[w] for w in words], layers=(i,)).vectors for i in range(3)]
    assert found["nouns"].layers == [answered(layer.numpy()) for layer in layers]


def test_a_models_own_mix_is_shown(data, tmp_path):
    (tmp_path / "words.tsv").write_text((data / "words.tsv").read_text())
    folder = tmp_path / "mixed"
    theirs = model("bert", vocab_size=80)
    theirs.save_pretrained(folder)
    encoder = Encoder.from_pretrained(folder, layer_mix=True)
    encoder.tokenizer = train_tokenizer([row[3] for row in SENSES], vocab_size=80)
    with torch.no_grad():
        encoder.mix.scalars.copy_(torch.tensor([0.0, 1.0, 2.0]))
    figure = analyze(encoder, tmp_path)[-1]
    assert figure.name == "mix" and figure.columns == ("label", "this model's mix")
    weights = torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist()
    assert [row[1] for row in figure.rows] == pytest.approx(weights)


def test_the_command_of_neighbours(encoder, data, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{row[3]}\n" for row in SENSES))
    said = run(
        "neighbours", encoder.base, texts, "--word", "Bank", "--count", 2, "--occurrences", 3
    )
    assert said.count("in the sentence: ") == said.count("static: ") == 3
    assert "a muddy [bank]\n" in said and "gold" not in said.splitlines()[0]
    file = tmp_path / "vectors.txt"
    file.write_text("bank 1 0\nriver 0.9 0.1\nmoney 0.2 1\n")
    said = run("neighbours", encoder.base, texts, "--word", "bank", "--static", file)
    assert "static: river, money\n" in said
    said = run("neighbours", encoder.base, texts, "--word", "spring", "--static", file)
    assert "static: (has no vector)" in said
    failed = failure(capsys, "neighbours", "no-such-model", texts, "--word", "emu")
    assert "the word 'emu' is in none of the 5 sentences: check its spelling" in failed
    file.write_text("4 2\nbank 1 0\nriver 0.9 0.1\n")
    failed = failure(
        capsys, "neighbours", "no-such-model", texts, "--word", "bank", "--static", file
    )
    assert "the first line says 4 vectors, the file holds 2" in failed
    failed = failure(capsys, "neighbours", "no-such-model", texts, "--word", "bank", "--count", 0)
    assert "--count must be at least 1, got 0" in failed
    failed = failure(capsys, "neighbours", encoder.base, texts, "--word", "bank", "--layer", 9)
    assert "from 0 (the embeddings' output) to the model's 2" in failed and "got 9" in failed


def test_too_little_memory_is_said_before_any_work(encoder, monkeypatch):
    monkeypatch.setattr("fastenc.models.word_vectors._free_memory", lambda: 1000)
    monkeypatch.setattr(Encoder, "forward", None)  # which nothing may call
    sentences = [row[3].split() for row in SENSES]
    labels = LabelledWords(sentences, [[str(i % 2) for i in range(len(s))] for s in sentences])
    for request in (
        lambda: learn_mix(encoder, labels),
        lambda: similarity_by_frequency(encoder, sentences),
        lambda: vectors_by_layer(encoder, [row[3] for row in SENSES]),
        lambda: isolated_vectors(encoder, sentences),
    ):
        with pytest.raises(ValueError, match=r"vectors of 32 numbers need .* the memory has"):
            request()


def test_static_vectors_beside_the_encoders(encoder, data, tmp_path):
    (tmp_path / "words.tsv").write_text((data / "words.tsv").read_text())
    file = tmp_path / "vectors.txt"
    file.write_text("bank 1 0\nriver 0.9 0.1\nmoney 0.2 1\n")
    _, figure = analyze(encoder, tmp_path, static=file)
    (row,) = (dict(zip(figure.columns, row, strict=True)) for row in figure.rows)
    assert row["items"] == 2 and row["covered"] == pytest.approx(2 / 3)
    assert row["static"] == pytest.approx(-1.0), "the nearer pair has the lower score"
    kept = ScoredPairs([("bank", "river"), ("bank", "money")], [3.0, 4.0])
    layers = [each.raw for each in correlation_by_layer(encoder, kept)]
    assert row["last layer"] == layers[-1] and row["best layer"] == max(layers)
    (tmp_path / "words.tsv").unlink()
    (tmp_path / "x.conllu").write_text(TREE.format(noun="bank", verb="is"))
    with pytest.raises(ValueError, match="static vectors are compared on tables"):
        analyze(encoder, tmp_path, static=file)


def test_what_is_wrong_is_said(encoder, data, tmp_path, capsys):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="holds no data to analyse"):
        analyze(encoder, tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_data(tmp_path / "x.txt")
    with pytest.raises(ValueError, match="at least three uses of 'river', got 0"):
        analyze(encoder, data, word="river")
    with pytest.raises(ValueError, match="sentences must be at least 1, got 0"):
        analyze(encoder, data, sentences=0)
    with pytest.raises(ValueError, match="map_method must be one of pca, umap"):
        analyze(encoder, data, map_method="tsne")
    with pytest.raises(ValueError, match=r"layers must be from 0 .* got 5"):
        analyze(encoder, data, layer=5)
    assert "--output must end in .html" in failure(capsys, "analyze", "x", data, "-o", "x.pdf")


def test_a_mix_weighs_the_layer_that_knows():
    """Labels that only one state holds get that state the largest weight."""
    from fastenc.models.word_vectors import WordVectors

    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=draw)
    states = torch.randn(400, 3, 8, generator=draw)
    states[:, 1, 0] += 6 * labels

    class Stub:
        config = type("Config", (), {"num_layers": 2, "hidden_size": 8})

        def embed_words(self, sentences, **options):
            return WordVectors(states.flatten(1), torch.arange(401))

    data = LabelledWords([["w"]] * 400, [[str(int(label))] for label in labels])
    weights = learn_mix(Stub(), data).weights
    assert weights.argmax() == 1 and weights[1] > 1.5 * weights[[0, 2]].max()


def test_figures_hold_what_they_show(tmp_path):
    figures = [
        by_layer("a", "A", "Says a.", {"x": [0.1, 0.2], "y": [0.3, 0.4]}, "value"),
        bars("b", "B", "Says b.", ["one", "two"], {"g": [1.0, 2.0]}, "axis", {"n": [3, 4]}),
        scatter("c", "C & D", "Says <c>.", [(0.0, 1.0, "g", "text"), (1.0, 0.0, "h", "other")]),
        heat_maps("d", "D", "Says d.", {"m": [[1.0, 2.0]], "n": [[3.0, 4.0]]}),
    ]
    assert figures[0].rows == [(0, 0.1, 0.3), (1, 0.2, 0.4)]
    assert figures[1].columns == ("label", "g", "n") and figures[1].rows[1] == ("two", 2.0, 4)
    assert figures[3].rows == [(1, 0, 1.0, 3.0), (1, 1, 2.0, 4.0)]
    write_report(tmp_path / "x.html", "T <t>", "meta", figures)
    page = (tmp_path / "x.html").read_text()
    assert "<h1>T &lt;t&gt;</h1>" in page and "Says &lt;c&gt;." in page and "C &amp; D" in page
