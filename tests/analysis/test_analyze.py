"""The page of figures: its content, that it needs no other file, and the data files beside it."""

import csv
import itertools
import re
import warnings
from importlib.metadata import version
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from fastenc.analysis import (
    ScoredPairs,
    StaticVectors,
    analyze,
    compare_analogies,
    compare_pairs,
    correlation_by_layer,
    find_data,
    isolated_vectors,
    labelled_words,
    learn_mix,
    read_analogies,
    similarity_by_frequency,
    static_correlation,
    vectors_by_layer,
)
from fastenc.analysis.analyze import _plan
from fastenc.analysis.data_files import names_of, train_and_test
from fastenc.analysis.figures import (
    INK,
    Panel,
    bars,
    by_layer,
    heat_maps,
    left_out,
    scatter,
)
from fastenc.analysis.probes import LabelledWords
from fastenc.analysis.report import write_report
from fastenc.data import train_tokenizer
from fastenc.models import Encoder
from tests.helpers.checkpoints import save
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


def exact_interval(found, asked):
    return tuple(binomtest(found, asked).proportion_ci(0.95, "exact"))


def assert_exact(row, name, asked):
    """A row's interval of a share is the exact binomial one."""
    expected = exact_interval(round(float(row[name]) * asked), asked)
    assert [float(row[f"{name}, {end}"]) for end in ("low", "high")] == pytest.approx(expected)


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
        by_relation = {row["label"].split(",")[0]: row for row in csv.DictReader(file)}
    assert float(by_relation["det"]["best fixed distance"]) == 1.0
    for row in by_relation.values():
        assert_exact(row, "best head", int(row["pairs"]))
        assert_exact(row, "best fixed distance", int(row["pairs"]))
    with open(tmp_path / "report_data" / "probes.csv", newline="") as file:
        header, *rows = csv.reader(file)
    for row in rows:
        assert_exact(dict(zip(header, row, strict=True)), "part of speech, probe", 9 * 3)
    probed = [name.removesuffix(", probe") for name in header if name.endswith(", probe")]
    assert probed == ["part of speech", "relation", "entity", "sense"]
    for quantity in ("probe, low", "probe, high", "random labels", "majority", "chance"):
        assert f"sense, {quantity}" in header
    with open(tmp_path / "report_data" / "neighbours.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sense"] for row in rows] == ["money", "money", "river", "river"]
    assert rows[1]["sentence"] == "a [bank] of money & <gold>"
    assert len({row["neighbours of the static vector"] for row in rows}) == 1
    assert "a [bank] of money &amp; &lt;gold&gt;" in page


def test_only_what_the_data_allow(encoder, data, tmp_path):
    (tmp_path / "words.tsv").write_text((data / "words.tsv").read_text())
    assert [figure.name for figure in analyze(encoder, tmp_path)] == ["similarity"]
    files = find_data(data)
    assert [path.name for path in files.trees] == ["dev.conllu", "train.conllu"]
    counts = [len(paths) for paths in vars(files).values()]
    assert counts == [1, 2, 2, 1, 0, 0]


def test_relations_are_those_of_dev_and_no_figure_uses_more_sentences(
    encoder, tmp_path, monkeypatch
):
    tree = lambda noun: TREE.format(noun=noun, verb="is")
    (tmp_path / "train.conllu").write_text("".join(map(tree, ("bank", "river", "money"))))
    (tmp_path / "dev.conllu").write_text("".join(map(tree, ("spring", "cat", "dog"))))
    given = {}
    for name in ("relations", "anisotropy"):
        keep = lambda encoder, data, title, name=name: given.update({name: data})
        monkeypatch.setattr(f"fastenc.analysis.sections.{name}_figure", keep)
    for section in _plan(encoder, tmp_path, None, 2, 2, "pca", None):
        if section.name in ("relations", "anisotropy"):
            section.make("")
    assert [each.words[1] for each in given["relations"]] == ["spring", "dog"]
    assert [words[1] for words in given["anisotropy"]] == ["bank", "money"]
    lines = ["word\tindex\tsense\tsentence", *("\t".join(map(str, row)) for row in SENSES)]
    (tmp_path / "senses.tsv").write_text("\n".join(lines))
    for path in tmp_path.glob("*.conllu"):
        path.unlink()
    for section in _plan(encoder, tmp_path, None, 2, 2, "pca", None):
        if section.name == "anisotropy":
            section.make("")
    assert given["anisotropy"] == [SENSES[0][3].split(), SENSES[3][3].split()]


def test_files_of_several_corpora(tmp_path):
    paths = [
        tmp_path / name for name in ("a/test.tsv", "a/train.tsv", "b/dev.tsv", "b/train.tsv.gz")
    ]
    assert train_and_test(paths) == [paths[1], paths[0]]
    assert train_and_test(paths[2:3]) == paths[2:3] and train_and_test([]) == []
    several = [tmp_path / "a" / name for name in ("a_test.tsv", "dev.tsv", "train.tsv")]
    assert train_and_test(several) == [several[2], several[1]]
    assert names_of(paths) == ["test", "a/train", "dev", "b/train"]


def test_what_probes_learn(data, tmp_path):
    labelled = labelled_words(find_data(data), 100)
    train, test = labelled["entity"]
    assert train.labels[0] == [None, "ORG", None, "PER"] and train.sentences == test.sentences
    train, test = labelled["sense"]  # of a single file, every second sentence is for testing
    rows = [0, 2, 4], [1, 3]
    for part, chosen in zip((train, test), rows, strict=True):
        assert part.sentences == [SENSES[i][3].split() for i in chosen]
        for i, labels, keys in zip(chosen, part.labels, part.control_keys, strict=True):
            word, index, sense, _ = SENSES[i]
            assert labels[index] == f"{word}: {sense}"
            assert keys[index] == f"{part.sentences[chosen.index(i)][index - 1]} {word}"
            assert sum(each is not None for each in labels) == 1
    assert [len(part.sentences) for part in labelled_words(find_data(data), 2)["relation"]] == [
        2,
        2,
    ]
    (tmp_path / "train.conll").write_text("the O\nbank B-ORG\n\n")
    assert not labelled_words(find_data(tmp_path), 100), "one type alone is nothing to tell apart"


def test_sentences_without_a_label_are_no_examples(tmp_path):
    labelled = [f"word{i} B-{'AB'[i // 2]}\n\n" for i in range(4)]
    (tmp_path / "train.conll").write_text("nothing O\n\n".join(["", *labelled]))
    train, test = labelled_words(find_data(tmp_path), 4)["entity"]
    assert train.sentences == [["word0"], ["word2"]] and test.sentences == [["word1"], ["word3"]]


def test_scored_texts_are_found(tmp_path):
    (tmp_path / "x.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    assert find_data(tmp_path).text_pairs == [tmp_path / "x.tsv"]


def test_analogies_by_both_kinds_of_vectors(encoder, tmp_path):
    """Compared with the enumeration of all candidates. A missing word is looked up in lower case."""
    words = ["bank", "is", "lends", "money", "river", "sleeps", "spring", "the"]
    draw = Random(0)
    asked = [tuple(draw.sample(words, 4)) for _ in range(40)]
    lines = [": words", asked[0][0].title() + " " + " ".join(asked[0][1:])]
    lines += [*map(" ".join, asked[1:]), "bank river emu spring", ": missing"]
    (tmp_path / "questions.txt").write_text("\n".join([*lines, "emu bank river spring"]))
    static = StaticVectors.of(words, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    scores = compare_analogies(encoder, static, read_analogies(tmp_path / "questions.txt"))
    assert set(scores) == {"words"}
    compared = scores["words"]
    assert (compared.asked, compared.items) == (40, 41)

    def right(vectors):
        unit = {w: v / np.linalg.norm(v) for w, v in zip(words, vectors, strict=True)}
        score = lambda w, a, b, c: unit[w] @ (unit[b] - unit[a] + unit[c])
        answers = (
            max((w for w in words if w not in given), key=lambda w, given=given: score(w, *given))
            for *given, _ in asked
        )
        return sum(answer == d for answer, (*_, d) in zip(answers, asked, strict=True))

    layers = [encoder.embed_words([[w] for w in words], layers=(i,)).vectors for i in range(3)]
    counts = [right(each.numpy()) for each in (static[words], *layers)]
    assert len(set(counts)) > 2, "kinds of vectors and layers must differ"
    assert [compared.static, *compared.layers] == [count / 40 for count in counts]
    intervals = [exact_interval(count, 40) for count in counts]
    assert [compared.static_interval, *compared.layer_intervals] == intervals


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
    monkeypatch.setattr("fastenc.models.embedding.space._free_memory", lambda: 1000)
    monkeypatch.setattr(Encoder, "forward", None)  # a call of it fails
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


def test_intervals_of_pairs_are_those_of_each_kind_of_vectors(encoder):
    words = ["bank", "money", "river", "spring", "lends"]
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    static = StaticVectors.of(words, matrix)
    pairs = list(itertools.combinations(words, 2))
    data = ScoredPairs([*pairs, ("bank", "emu")], [*map(float, range(10)), 3.0])
    kept = ScoredPairs(pairs, data.scores[:10])
    compared = compare_pairs(encoder, static, data)
    assert compared.static_interval == static_correlation(static, kept).interval
    layers = [each.interval for each in correlation_by_layer(encoder, kept)]
    assert compared.layer_intervals == layers and len({compared.static_interval, *layers}) > 2


def test_static_vectors_are_compared_on_tables(encoder, tmp_path):
    file = tmp_path / "vectors.txt"
    file.write_text("bank 1 0\nriver 0.9 0.1\nmoney 0.2 1\n")
    (tmp_path / "x.conllu").write_text(TREE.format(noun="bank", verb="is"))
    with pytest.raises(ValueError, match="static vectors are compared on tables"):
        analyze(encoder, tmp_path, static=file)


def test_bad_input_is_named(encoder, data, tmp_path, capsys):
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
    """If only one state holds the labels, it gets the largest weight."""
    from fastenc.models.embedding.word_vectors import WordVectors

    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=draw)
    states = torch.randn(400, 3, 8, generator=draw)
    states[:, 1, 0] += 6 * labels

    class Stub:
        config = type("Config", (), {"num_layers": 2, "hidden_size": 8})

        def embed_words(self, sentences, **options):
            return WordVectors(states.flatten(1), torch.arange(len(states) + 1))

    data = LabelledWords([["w"]] * 400, [[str(int(label))] for label in labels])
    weights = learn_mix(Stub(), data).weights
    assert weights.argmax() == 1 and weights[1] > 1.5 * weights[[0, 2]].max()
    # Neither the size nor the mean of a layer's vectors counts.
    states = states * torch.tensor([100.0, 0.1, 1.0])[:, None] + 3
    torch.testing.assert_close(learn_mix(Stub(), data).weights, weights, rtol=1e-3, atol=1e-3)
    # Words without a label lie between the others.
    states = torch.stack((states[1:].roll(7, 0), states[:-1]), 1).flatten(0, 1)
    data = LabelledWords([["v", "w"]] * 399, [[None, str(int(label))] for label in labels[:-1]])
    again = learn_mix(Stub(), data).weights
    assert again.argmax() == 1 and again[1] > 1.5 * again[[0, 2]].max()


def test_figures_hold_what_they_show(tmp_path):
    lines = {"x": [0.1, 0.2], "y": [0.3, 0.4]}
    panels = [
        Panel("one", "value", lines, intervals={"x": [(0.0, 0.2), (0.1, 0.3)]}),
        Panel("two", "share", {"x": [0.5, 0.6]}, "n = 7", levels={"chance": 0.25}),
    ]
    points = [(0.0, 1.0, "g", "a <text>"), (1.0, 0.0, "h", "other"), (0.5, 0.5, "g", "third")]
    interval = {"g": [(0.5, 1.5), (1.5, 2.5)]}
    figures = [
        by_layer("a", "A", "Says a.", panels),
        bars(
            "b",
            "B",
            "Says b.",
            ["one", "two"],
            {"g": [1.0, 2.0]},
            "axis",
            ["n = 3", "n = 4"],
            interval,
            {"n": [3, 4]},
        ),
        scatter("c", "C & D", "Says <c>.", points, ("PC 1 (60 % of variance)", "PC 2")),
        heat_maps("d", "D", "Says d.", {"m": [[1.0, 2.0]], "n": [[5.0, 4.0]]}),
        left_out("e", "E", "the data are too few"),
    ]
    assert figures[0].columns == (
        "layer",
        "one, x",
        "one, x, low",
        "one, x, high",
        "one, y",
        "two, x",
        "two, chance",
    )
    assert figures[0].rows == [
        (0, 0.1, 0.0, 0.2, 0.3, 0.5, 0.25),
        (1, 0.2, 0.1, 0.3, 0.4, 0.6, 0.25),
    ]
    assert figures[1].columns == ("label", "g", "g, low", "g, high", "n")
    assert figures[1].rows[1] == ("two", 2.0, 1.5, 2.5, 4)
    assert figures[3].rows == [(1, 0, 1.0, 5.0), (1, 1, 2.0, 4.0)]
    shown = [_texts(figure.drawing) for figure in figures[:4]]
    assert {"value", "share", "two", "n = 7", "x", "y", "chance"} <= shown[0]
    assert {"one", "n = 3", "axis"} <= shown[1]
    assert {"PC 1 (60 % of variance)", "PC 2", "g (n = 2)", "h (n = 1)"} <= shown[2]
    assert {"most: layer 1, head 1", "most: layer 1, head 0"} <= shown[3]
    svg = ElementTree.fromstring(figures[2].drawing)
    titles = [each.text for each in svg.iterfind(".//{*}use/{*}title")]
    assert titles == ["g: a <text>", "g: third", "h: other"], "shown over the points"
    write_report(tmp_path / "x.html", "T <t>", {"Seed": "<0>"}, figures)
    page = (tmp_path / "x.html").read_text()
    assert "<h1>T &lt;t&gt;</h1>" in page and "Says &lt;c&gt;." in page and "C &amp; D" in page
    assert "<dt>Seed</dt><dd>&lt;0&gt;</dd>" in page
    assert "Left out: the data are too few" in page
    assert not (tmp_path / "x_data" / "e.csv").exists()


def _texts(svg):
    return {"".join(each.itertext()) for each in ElementTree.fromstring(svg).iterfind(".//{*}text")}


def test_the_page_says_where_its_figures_come_from(encoder, data, tmp_path):
    output = tmp_path / "report.html"
    options = ("--sentences", 7, "--word", "bank")
    run("analyze", encoder.base, data, "-o", output, *options)
    page = output.read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (
        facts["Command"]
        == f"fastenc analyze {encoder.base} {data} -o {output} --sentences 7 --word bank"
    )
    assert "2 layers, width 32" in facts["Model"] and facts["Seed"].startswith("0")
    assert str(data) in facts["Data"] and "at most 7 sentences" in facts["Data"]
    for package in ("fastenc", "torch", "scikit-learn", "matplotlib"):
        assert f"{package} {version(package)}" in facts["Versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["Date"])
    headings = dict(re.findall(r'<section id="(\w+)"><h2>(.*?)</h2>', page))
    assert headings["map"] == "Uses of &#x27;bank&#x27; in senses.tsv, layer 2"
    assert headings["relations"].endswith(": dev.conllu") and headings["similarity"].endswith(
        ": words.tsv"
    )
    captions = dict(re.findall(r'<section id="(\w+)"><h2>.*?</h2><p>(.*?)</p>', page))
    for name in ("frequency", "similarity"):
        assert (
            "percentile bootstrap" in captions[name] and "1,000 resamples, seed 0" in captions[name]
        )
    for name in ("relations", "probes"):
        assert "exact binomial" in captions[name]
    drawn = re.findall(r"<svg.*?</svg>", page, re.S)
    texts = set().union(*map(_texts, drawn))
    assert sum(bool(re.fullmatch(r"PC [12] \(\d+% of variance\)", text)) for text in texts) == 2
    assert any(re.fullmatch(r"layer \d, head \d; [+-]\d; n = \d+", text) for text in texts)
    assert {"majority", "chance", "mean cosine", "share of anisotropy"} <= texts


def test_a_map_by_umap_says_so(encoder, data, tmp_path):
    pytest.importorskip("umap")
    (tmp_path / "senses.tsv").write_text((data / "senses.tsv").read_text())
    figure = analyze(encoder, tmp_path, word="bank", map_method="umap")[0]
    assert {"UMAP 1 (no unit)", "UMAP 2 (no unit)"} <= _texts(figure.drawing)
    assert len(figure.rows) == 4 and np.isfinite([row[:2] for row in figure.rows]).all()


def _written(folder, senses=(), trees=(), pairs=()):
    folder.mkdir()
    if senses:
        rows = ["word\tindex\tsense\tsentence", *("\t".join(map(str, row)) for row in senses)]
        (folder / "senses.tsv").write_text("\n".join(rows))
    if trees:
        (folder / "train.conllu").write_text("".join(trees))
    if pairs:
        rows = ["word1\tword2\tscore", *("\t".join(map(str, row)) for row in pairs)]
        (folder / "words.tsv").write_text("\n".join(rows) + "\n")
    return folder


ONE_WORD = "1\tbank\tx\tNOUN\tNN\t_\t0\troot\t_\t_\n\n"
BARE = [("bank", 1, "money", "the bank is")]


@pytest.mark.parametrize(
    ("files", "drawn", "reasons"),
    [
        (
            {"trees": [ONE_WORD]},
            {"heads"},
            {
                "anisotropy": "at least two vectors|equal in",
                "frequency": "got none in 1 ",
                "relations": "two related words",
            },
        ),
        (
            {"trees": [ONE_WORD] * 4},
            {"heads", "frequency"},
            {"anisotropy": "equal in 32 of 32", "relations": "two related words"},
        ),
        (
            {"trees": [TREE.format(noun="bank", verb="is")]},
            {"anisotropy", "heads", "relations"},
            {"frequency": "got none in 1 "},
        ),
        (
            {"senses": BARE},
            {"neighbours", "anisotropy", "heads"},
            {"map": "got 1 of 'bank'", "frequency": "got none"},
        ),
        (
            {"senses": BARE * 5},
            {"neighbours", "anisotropy", "heads", "frequency"},
            {"map": "got 5 equal ones"},
        ),
        ({"pairs": [("bank", "river", 3)]}, set(), {"similarity": "got 1 pairs with 1"}),
        (
            {"pairs": [("bank", "river", 3), ("river", "money", 3)]},
            set(),
            {"similarity": "got 2 pairs with 1"},
        ),
        (
            {"pairs": [("bank", "bank", 3), ("bank", "bank", 4)]},
            set(),
            {"similarity": "1 text vectors that are equal"},
        ),
    ],
)
def test_too_few_data_leave_a_figure_out_and_say_why(encoder, tmp_path, files, drawn, reasons):
    figures = {
        figure.name: figure for figure in analyze(encoder, _written(tmp_path / "data", **files))
    }
    assert {name for name, figure in figures.items() if figure.drawing} == drawn
    assert set(figures) - drawn == set(reasons)
    for name, reason in reasons.items():
        assert re.search(f"^Left out: .*(?:{reason})", figures[name].caption)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(tmp_path / "x.html", "T", {}, list(figures.values()))


def test_a_tokenizer_without_a_begin_token_leaves_out_only_the_relations(tmp_path):
    trees = [TREE.format(noun="bank", verb="is"), TREE.format(noun="river", verb="lends")]
    texts = ["the bank is", "the river lends"]
    tokenizer = train_tokenizer(texts, model_type="t5", vocab_size=200)
    theirs = model("t5", vocab_size=tokenizer.get_vocab_size())
    encoder = Encoder.from_pretrained(save(theirs, tmp_path / "model"))
    encoder.tokenizer = tokenizer
    figures = analyze(encoder, _written(tmp_path / "data", trees=trees))
    assert [each.name for each in figures if not each.drawing] == ["relations"]
    caption = next(each.caption for each in figures if not each.drawing)
    assert re.search("^Left out: .* special token before a text", caption)


def test_one_bad_set_of_pairs_leaves_the_others(encoder, data, tmp_path):
    folder = _written(tmp_path / "data", pairs=[("bank", "river", 3)])
    (folder / "more.tsv").write_text((data / "words.tsv").read_text())
    (figure,) = analyze(encoder, folder)
    assert figure.columns[1] == "as they are, more (n = 3)"
    assert "words is left out: a correlation needs pairs" in figure.caption


def test_labels_that_only_the_words_left_out_have(tmp_path):
    """A probe trains on the first labelled words only. Labels that only the test set has are no error."""
    rare = TREE.format(noun="bank", verb="is").replace("\tDET\t", "\tINTJ\t")
    trees = [TREE.format(noun="bank", verb="is")] * 5 + [rare]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.conllu").write_text("".join(trees))
    train, test = labelled_words(find_data(tmp_path), 100, 9)["part of speech"]
    assert len(train.sentences) == 3 and len(test.sentences) == 3
    train, test = labelled_words(find_data(tmp_path), 100, 100)["part of speech"]
    assert {label for row in test.labels for label in row} == {"DET", "NOUN", "VERB", "INTJ"}


def test_a_folder_that_cannot_be_written_is_said_before_any_work(
    data, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").write_text("x")
    failed = failure(capsys, "analyze", "no-such-model", data, "-o", tmp_path / "file" / "x.html")
    assert f"{tmp_path / 'file'} is a file where a folder has to be" in failed

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    failed = failure(capsys, "analyze", "no-such-model", data, "-o", tmp_path / "x.html")
    assert f"{tmp_path} cannot be opened or written: check its permissions" in failed


def test_progress_is_a_line_now_and_then_without_a_terminal(encoder, data, tmp_path, monkeypatch):
    monkeypatch.setattr("fastenc._base.progress.LINE_SECONDS", 0.0)
    said = run("analyze", encoder.base, data, "-o", tmp_path / "x.html", "--word", "bank")
    counted = [line for line in said.splitlines() if line.startswith("analysing: ")]
    assert len(counted) == 9 and counted[-1].startswith("analysing: 9 of 9 figures")
