"""The figures' numbers, from measurements that are given; nothing is drawn."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.decomposition import PCA

from fastenc.analysis import Isotropy, Moments, sections
from fastenc.analysis.analyze import uses_of
from fastenc.analysis.heads import HeadSummary
from fastenc.analysis.neighbours import Occurrence, in_brackets
from fastenc.analysis.probes import LabelledWords, ProbeScore
from fastenc.analysis.relations import DIRECTIONS, RelationScores
from fastenc.analysis.similarity import FrequencyBin, LayerCorrelation, LayerIsotropy
from fastenc.analysis.static_comparison import StaticComparison
from fastenc.data.senses import SenseData, Target
from fastenc.models.embedding.word_vectors import WordVectors
from fastenc.nn import ScalarMix

TO_HEAD, TO_DEPENDENT = DIRECTIONS
WORDS = [["a", "b"]]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr("fastenc.analysis.figures.draw", lambda *given, **options: "")


def measured(monkeypatch, name, *results):
    """The measurement ``name`` gives these results, one after another."""
    rest = iter(results)
    monkeypatch.setattr(sections, name, lambda *given, **options: next(rest))


def columns(figure):
    return dict(zip(figure.columns, zip(*figure.rows, strict=True), strict=True))


def test_what_heads_attend_to(monkeypatch):
    names = ("entropy", "distance", "first", "last", "itself", "previous", "next")
    means = {name: torch.tensor([[i + 0.25, i + 0.5]]) for i, name in enumerate(names)}
    measured(monkeypatch, "summarize_heads", HeadSummary(7, means))
    figure = sections.heads_figure(None, WORDS, "T")
    assert figure.columns[2:] == (
        "entropy (nats)",
        "distance (tokens)",
        "share on [SEP]",
        "share on neighbours",
    )
    assert figure.rows == [(1, 0, 0.25, 1.25, 3.25, 11.5), (1, 1, 0.5, 1.5, 3.5, 12.0)]


def test_anisotropy_before_and_after_standardising(monkeypatch):
    raw, scaled = Isotropy.empty(2), Isotropy.empty(2)
    raw.add(torch.tensor([[3.0, 4.0], [3.0, 4.0]]))
    scaled.add(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    measured(monkeypatch, "isotropy_by_layer", [LayerIsotropy(Moments.empty(2), raw, scaled)])
    (row,) = sections.anisotropy_figure(None, WORDS, "T").rows
    # The cosines are 1 = 0.6² + 0.8² and 0.6.
    assert row == pytest.approx((0, 1.0, 0.6, 0.64))


def test_similarity_shows_the_largest_set_first(monkeypatch, tmp_path):
    small, large = tmp_path / "small.tsv", tmp_path / "large.tsv"
    small.write_text("word1\tword2\tscore\na\tb\t1\n")
    large.write_text("sentence1\tsentence2\tscore\na\tb\t1\nb\tc\t2\n")
    of_large, of_small = (LayerCorrelation(n, n + 0.5, (n - 1, n + 1)) for n in (1, 3))
    measured(monkeypatch, "correlation_by_layer", [of_large], [of_small])
    values = columns(sections.similarity_figure(None, [small], [large], "T"))
    of = {name: value for name, (value,) in values.items()}
    assert of["as they are, large (n = 2)"] == 1 and of["standardised, large (n = 2)"] == 1.5
    assert of["as they are, small (n = 1)"] == 3 and of["standardised, small (n = 1)"] == 3.5
    assert of["as they are, large (n = 2), low"] == 0 and list(of)[1].startswith("as they are, l")


def test_the_better_direction_of_the_most_frequent_relations(monkeypatch):
    monkeypatch.setattr(sections, "RELATIONS", 2)
    scores = {}
    for relation, found in {"rare": (1, 1), "det": (3, 8), "nsubj": (6, 2)}.items():
        for direction, right in zip(DIRECTIONS, found, strict=True):
            heads = torch.tensor([[0, right], [0, 0]])
            offset = 1 if direction == TO_HEAD else -1
            count = 10 - 8 * (relation == "rare")
            scores[relation, direction] = RelationScores(count, heads, Counter({offset: 2}))
    measured(monkeypatch, "score_relations", scores)
    values = columns(sections.relations_figure(None, [], "T"))
    assert values["label"] == ("det, to dependent", "nsubj, to head")
    assert values["best head"] == (0.8, 0.6) and values["best fixed distance"] == (0.2, 0.2)
    assert values["layer"] == (1, 1) and values["head"] == (1, 1) and values["distance"] == (-1, 1)
    assert values["best head, low"][0] == binomtest(8, 10).proportion_ci(0.95, "exact").low


def test_frequencies_are_those_below_the_next_power(monkeypatch):
    measured(monkeypatch, "similarity_by_frequency", [FrequencyBin(4, 8, 3, 0.5, (0.4, 0.6))])
    assert sections.frequency_figure(None, WORDS, "T").rows == [("4 to 7 times", 0.5, 0.4, 0.6, 3)]


def test_probes_beside_chance_and_the_majority(monkeypatch):
    """Three labels; the most frequent one of training is one of four test labels."""
    train = LabelledWords([["w"] * 6], [["x", "x", "y", "z", None, "x"]])
    test = LabelledWords([["w"] * 4], [["x", "y", "y", "y"]])
    measured(monkeypatch, "probe_by_layer", [ProbeScore(0.75, 0.5, 4)])
    (row,) = sections.probes_figure(None, {"kind": (train, test)}, 9, "T").rows
    interval = binomtest(3, 4).proportion_ci(0.95, "exact")
    assert row == pytest.approx((0, 0.75, interval.low, interval.high, 0.5, 0.25, 1 / 3))


def test_the_mix_of_a_task_is_in_the_order_of_the_layers(monkeypatch):
    mix = ScalarMix(3)
    with torch.no_grad():
        mix.scalars.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
        mix.gamma.fill_(2)
    measured(monkeypatch, "learn_mix", mix)
    data = LabelledWords(WORDS, [["x", None]])
    encoder = type("Stub", (), {"config": type("C", (), {"num_layers": 2}), "mix": None})
    values = columns(sections.mix_figure(encoder, {"kind": (data, data)}, 9, "T"))
    assert values["label"] == ("embeddings", "layer 1", "layer 2")
    assert values["kind (n = 1)"] == pytest.approx((0.5, 0.3, 0.2))


def test_static_vectors_beside_the_last_and_the_best_layer(monkeypatch, tmp_path):
    path = tmp_path / "words.tsv"
    path.write_text("word1\tword2\tscore\na\tb\t1\n")
    intervals = [(0.1, 0.2), (0.3, 0.4), (0.5, 0.6)]
    compared = StaticComparison(0.7, [0.15, 0.55, 0.35], (0.65, 0.75), intervals, 3, 4)
    measured(monkeypatch, "compare_pairs", compared)
    vectors = type("Stub", (), {"name": "s"})
    values = columns(sections.static_figure(None, vectors, [path], [], "T"))
    of = {name: value for name, (value,) in values.items()}
    assert (of["static"], of["last layer"], of["best layer"], of["best"]) == (0.7, 0.35, 0.55, 1)
    assert (of["last layer, low"], of["last layer, high"]) == (0.5, 0.6)
    assert (of["static, low"], of["static, high"], of["covered"]) == (0.65, 0.75, 0.75)


def by_letter(word, layer):
    """A unit vector whose angle is that of the word's letter with the layer's number."""
    angle = (ord(word[layer]) - ord("a")) / 20
    return [np.cos(angle), np.sin(angle)]


class Letters:
    """An encoder whose layers know one letter each."""

    def embed_words(self, sentences, *, layers, show_progress):
        (layer,) = layers
        rows = [by_letter(word, layer) for sentence in sentences for word in sentence]
        offsets = np.cumsum([0, *map(len, sentences)])
        return WordVectors(torch.tensor(rows), torch.from_numpy(offsets))


def test_a_map_shows_the_words_vectors_in_the_layer():
    sentences = [["old", "bank"], ["cat", "my"], ["bee", "work"], ["a", "muddy", "river"]]
    targets = [Target(i, word, "l", ("x",), "") for i, word in enumerate((1, 0, 1, 2))]
    figure = sections.map_of_uses(Letters(), sentences, targets, 0, "pca", "T")
    chosen = np.array([by_letter(word, 0) for word in ("bank", "cat", "work", "river")])
    expected = PCA(2, random_state=0).fit_transform(chosen)
    np.testing.assert_allclose([row[:2] for row in figure.rows], expected, atol=1e-5)


def test_neighbours_are_those_in_the_layer():
    data = SenseData([["bank", "cat"], ["bee", "work"]], [Target(0, 0, "bank", ("x",), "")])
    for layer, nearest in ((0, "bee"), (1, "cat"), (-1, "work")):
        figure = sections.neighbours_figure(Letters(), data, data.targets, layer, 9, None, "T")
        (row,) = figure.rows
        assert row[:2] == ("[bank] cat", "x")
        assert [words.split(", ")[0] for words in row[2:]] == [nearest] * 2


def test_the_word_with_the_most_uses_is_shown():
    target = lambda lemma: Target(0, 0, lemma, ("x",), "")
    data = SenseData(WORDS, [target(lemma) for lemma in ("b", "a", "c", "a", "c", "a")])
    lemma, chosen = uses_of(data, None, 2)
    assert lemma == "a" and [each.lemma for each in chosen] == ["a", "a"]


def test_a_word_is_shown_with_the_words_around_it():
    use = Occurrence([*"abcdefg"], 3, [], [])
    assert in_brackets(use, 2) == "b c [d] e f" and in_brackets(use) == "a b c [d] e f g"
