"""Nearest words of a word in its sentences: a contextual vector tells its senses apart, a static one cannot."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastenc.analysis.static_vectors import Neighbour, StaticVectors


class Occurrence(NamedTuple):
    """A word in its sentence, and its nearest words."""

    sentence: list[str]
    word_index: int
    contextual: list[Neighbour]
    static: list[Neighbour]


def find_occurrences(
    sentences: Sequence[Sequence[str]], word: str, most: int
) -> list[tuple[Sequence[str], int]]:
    """The first sentences with a word, and its index in each; upper and lower case are one.

    Raises: ValueError where no sentence has it.
    """
    wanted, found = word.lower(), []
    for sentence in sentences:
        lowered = [each.lower() for each in sentence]
        if wanted in lowered:
            found.append((sentence, lowered.index(wanted)))
    if not found:
        raise ValueError(
            f"the word {word!r} is in none of the {len(sentences):,} sentences: check its spelling, or give more"
        )
    return found[:most]


def isolated_vectors(
    encoder: Any, sentences: Sequence[Sequence[str]], layers: Sequence[int] = (-1,)
) -> StaticVectors:
    """A static vector for each different word of sentences, from the encoder: that of the word alone."""
    words = sorted({word.lower() for sentence in sentences for word in sentence})
    found = encoder.embed_words([[word] for word in words], layers=layers, show_progress=False)
    return StaticVectors.of(words, found.vectors)


def compare_neighbours(
    encoder: Any,
    occurrences: Sequence[tuple[Sequence[str], int]],
    pool: Sequence[Sequence[str]],
    static: StaticVectors,
    count: int = 5,
    layers: Sequence[int] = (-1,),
) -> list[Occurrence]:
    """The nearest words of each occurrence of a word, and those of its static vector.

    Args:
        occurrences: (sentence, index of the word in it).
        pool: sentences whose words are the contextual candidates; the word itself is left out.
        layers: whose mean is a contextual vector.
        static: its neighbours of the same word, none where the word is not there.
    Raises: ValueError for an index outside its sentence.
    """
    for sentence, index in occurrences:
        if not 0 <= index < len(sentence):
            raise ValueError(
                f"index {index} is not in the sentence of {len(sentence)} words {' '.join(sentence)!r}"
            )
    embed = lambda texts: encoder.embed_words(texts, layers=layers, show_progress=False)
    queries = embed([sentence for sentence, _ in occurrences])
    words = [word.lower() for sentence in pool for word in sentence]
    candidates = StaticVectors.of(words, embed(pool).vectors)
    found = []
    for number, (sentence, index) in enumerate(occurrences):
        word = sentence[index].lower()
        vector = queries[number][index][None]
        near: list[Neighbour] = []
        # Occurrences of one word are often neighbours of one another.
        for each in candidates.nearest(vector, 50 * count, [[word]])[0]:
            if len(near) < count and each.word not in {other.word for other in near}:
                near.append(each)
        own = static.neighbours(word, count) if word in static else []
        found.append(Occurrence(list(sentence), index, near, own))
    return found


def in_brackets(use: Occurrence, around: int = 8) -> str:
    """The words around a use, and it in brackets."""
    before = use.sentence[max(use.word_index - around, 0) : use.word_index]
    after = use.sentence[use.word_index + 1 : use.word_index + 1 + around]
    return " ".join([*before, f"[{use.sentence[use.word_index]}]", *after])


def listed(use: Occurrence) -> tuple[str, str]:
    """The contextual and the static neighbours in words."""
    words = lambda neighbours: ", ".join(each.word for each in neighbours) or "(has no vector)"
    return words(use.contextual), words(use.static)
