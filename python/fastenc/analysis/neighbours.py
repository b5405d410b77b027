"""Compares a word's nearest words in different sentences with those of its static vector.

A contextual vector can distinguish the senses of a word, a static vector cannot.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.analysis.static_vectors import Neighbour, StaticVectors
from fastenc.models.encoder import Encoder


class Occurrence(NamedTuple):
    """A word in a sentence, and its nearest words.

    Fields:
        word_index: index of the word in the sentence.
        contextual: nearest words of its vector in this sentence.
        static: nearest words of its static vector; empty if it has none.
    """

    sentence: list[str]
    word_index: int
    contextual: list[Neighbour]
    static: list[Neighbour]


def find_occurrences(
    sentences: Sequence[Sequence[str]], word: str, most: int
) -> list[tuple[Sequence[str], int]]:
    """The first ``most`` sentences with a word, and its index in each. Case does not matter.

    Raises: ValueError if no sentence has the word.
    """
    wanted, occurrences = word.lower(), []
    for sentence in sentences:
        lowered = [each.lower() for each in sentence]
        if wanted in lowered:
            occurrences.append((sentence, lowered.index(wanted)))
    if not occurrences:
        raise ValueError(
            f"the word {word!r} is in none of the {len(sentences):,} sentences: check its spelling, or give more "
            "sentences"
        )
    return occurrences[:most]


def isolated_vectors(
    encoder: Encoder,
    sentences: Sequence[Sequence[str]],
    layers: Sequence[int] = (-1,),
    show_progress: bool | None = False,
) -> StaticVectors:
    """A static vector for each different word of the sentences: the encoder's vector of the word by itself.

    Args: show_progress: as in :meth:`fastenc.Encoder.embed_words`.
    """
    words = sorted({word.lower() for sentence in sentences for word in sentence})
    vectors = encoder.embed_words(
        [[word] for word in words], layers=layers, show_progress=show_progress
    )
    return StaticVectors.of(words, vectors.vectors)


def compare_neighbours(
    encoder: Encoder,
    occurrences: Sequence[tuple[Sequence[str], int]],
    pool: Sequence[Sequence[str]],
    static: StaticVectors,
    count: int = 5,
    layers: Sequence[int] = (-1,),
    show_progress: bool | None = False,
) -> list[Occurrence]:
    """The nearest words of each occurrence of a word by its contextual and by its static vector.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        occurrences: (sentence, index of the word in it).
        pool: sentences whose words are the contextual candidates, the word itself excluded.
        static: the static vectors. The candidates are its words. A word is looked up in lower case, and if it is not
            there, as it stands in its sentence.
        count: number of nearest words.
        layers: layers that are averaged to a contextual vector.
        show_progress: of the pool, as in :meth:`fastenc.Encoder.embed_words`.
    Raises: ValueError for an index outside its sentence.
    """
    for sentence, index in occurrences:
        if not 0 <= index < len(sentence):
            raise ValueError(
                f"index must be from 0 to {len(sentence) - 1} in the sentence {' '.join(sentence)!r}, got {index}: "
                "correct it"
            )
    queries = encoder.embed_words(
        [sentence for sentence, _ in occurrences], layers=layers, show_progress=False
    )
    candidates = encoder.embed_words(pool, layers=layers, show_progress=show_progress)
    names = [sentence[index].lower() for sentence, index in occurrences]
    words = [word.lower() for sentence in pool for word in sentence]
    of_queries = [queries[number][index] for number, (_, index) in enumerate(occurrences)]
    contextual = _nearest_words(of_queries, names, words, candidates.vectors, count)
    return [
        Occurrence(
            list(sentence), index, nearest, _static_neighbours(sentence[index], static, count)
        )
        for (sentence, index), nearest in zip(occurrences, contextual, strict=True)
    ]


def _static_neighbours(word: str, static: StaticVectors, count: int) -> list[Neighbour]:
    """The nearest words of a word in lower case, else as it stands in the sentence; none if neither has a vector."""
    known = next((each for each in (word.lower(), word) if each in static), None)
    return [] if known is None else static.neighbours(known, count)


def _nearest_words(
    queries: Sequence[Tensor],
    own: Sequence[str],
    words: Sequence[str],
    vectors: Tensor,
    count: int,
) -> list[list[Neighbour]]:
    """The words with the highest cosine similarities, best first. A word's cosine is that of its most similar use.

    A word may be used thousands of times, so each word's uses are reduced to one before the best words are chosen.

    Args:
        queries: vectors of width ``vectors.shape[1]``.
        own: each query's own word, which is left out.
        words: the word of each row of ``vectors``.
    """
    if not queries:
        return []
    names = sorted(set(words))
    number = {word: i for i, word in enumerate(names)}
    of_row = torch.tensor([number[word] for word in words], dtype=torch.long)
    unit = F.normalize(torch.stack(list(queries)).float(), dim=1)
    cosines = unit @ F.normalize(vectors.float(), dim=1).T
    best = torch.full((len(unit), len(names)), -torch.inf)
    best.scatter_reduce_(1, of_row.expand_as(cosines), cosines, "amax")
    for row, word in enumerate(own):
        if word in number:
            best[row, number[word]] = -torch.inf
    values, chosen = best.topk(min(count, len(names)), dim=1)
    return [
        [Neighbour(names[i], v) for i, v in zip(indices, cosine, strict=True) if v > -torch.inf]
        for indices, cosine in zip(chosen.tolist(), values.tolist(), strict=True)
    ]


def in_brackets(use: Occurrence, around: int = 8) -> str:
    """The word in brackets, with up to ``around`` words before and after it."""
    before = use.sentence[max(use.word_index - around, 0) : use.word_index]
    after = use.sentence[use.word_index + 1 : use.word_index + 1 + around]
    return " ".join([*before, f"[{use.sentence[use.word_index]}]", *after])


def listed(use: Occurrence) -> tuple[str, str]:
    """The contextual and the static neighbours as texts."""
    words = lambda neighbours: ", ".join(each.word for each in neighbours)
    return words(use.contextual) or "(no other word)", words(use.static) or "(has no vector)"
