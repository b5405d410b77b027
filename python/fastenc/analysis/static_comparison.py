"""Compares static vectors with an encoder's vectors of single words, on pairs of words and on analogies."""

from typing import NamedTuple

from fastenc.analysis.analogies import Sections, score_analogies
from fastenc.analysis.intervals import Interval, exact_interval
from fastenc.analysis.similarity import ScoredPairs, correlation_by_layer, vectors_by_layer
from fastenc.analysis.static_vectors import StaticVectors, static_correlation
from fastenc.models.encoder import Encoder


class StaticComparison(NamedTuple):
    """Scores of both kinds of vectors on the same items, those whose words all have a static vector.

    A score is Spearman's correlation with human scores of pairs, or the share of correct answers to analogies.

    Fields:
        static: score of the static vectors.
        layers: score of each layer of the encoder, from the embeddings' output on.
        static_interval, layer_intervals: their 95 % intervals: for pairs by a bootstrap over the pairs, for analogies
            the exact binomial ones.
        asked: number of items whose words all have a static vector.
        items: number of all items.
    """

    static: float
    layers: list[float]
    static_interval: Interval
    layer_intervals: list[Interval]
    asked: int
    items: int


def compare_pairs(
    encoder: Encoder, vectors: StaticVectors, data: ScoredPairs
) -> StaticComparison | None:
    """The comparison on pairs of words; None if fewer than two pairs have static vectors."""
    known = [i for i, pair in enumerate(data.pairs) if all(word in vectors for word in pair)]
    if len(known) < 2:
        return None
    asked = ScoredPairs([data.pairs[i] for i in known], [data.scores[i] for i in known])
    layers = correlation_by_layer(encoder, asked)
    static = static_correlation(vectors, asked)
    return StaticComparison(
        static.spearman,
        [each.raw for each in layers],
        static.interval,
        [each.interval for each in layers],
        len(known),
        len(data.pairs),
    )


def compare_analogies(
    encoder: Encoder, vectors: StaticVectors, sections: Sections
) -> dict[str, StaticComparison]:
    """The comparison on the questions of each section. The candidate answers are the words of all questions asked.

    If a word has no static vector as it is written, it is looked up in lower case. The encoder's vector of a word is
    that of the word by itself. Sections without questions to ask are left out.
    """
    known: Sections = {}
    for name, questions in sections.items():
        spelt = [tuple(_spelling(vectors, word) for word in question) for question in questions]
        if asked := [question for question in spelt if None not in question]:
            known[name] = asked  # type: ignore[assignment]
    words = sorted({word for questions in known.values() for each in questions for word in each})
    if not words:
        return {}
    static = score_analogies(StaticVectors.of(words, vectors[words]), known)
    layers = [
        score_analogies(StaticVectors.of(words, of_layer), known)
        for of_layer in vectors_by_layer(encoder, words)
    ]
    share = lambda score: score.right / score.asked
    interval = lambda score: exact_interval(score.right, score.asked)
    return {
        name: StaticComparison(
            share(static[name]),
            [share(each[name]) for each in layers],
            interval(static[name]),
            [interval(each[name]) for each in layers],
            len(known[name]),
            len(sections[name]),
        )
        for name in known
    }


def _spelling(vectors: StaticVectors, word: str) -> str | None:
    """The word, or else its lower-case form, if it has a vector; None if neither has."""
    return next((each for each in (word, word.lower()) if each in vectors), None)
