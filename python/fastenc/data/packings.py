"""The ways to cut running text into training examples."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from fastenc.data.blocks import block, doc_sentence_places, full_sentence_places
from fastenc.data.segments import segment_pair, segment_pair_places
from fastenc.data.sentences import SentenceTokens
from fastenc.models.tokenizers import SpecialTokens


class Plan(NamedTuple):
    """Places first, examples when they are asked for: places are a few numbers, whatever the text's size.

    Fields:
        places: (text, block size, random numbers) → (start, split, stop, document) of each example.
        example: (tokens, place, special tokens) → the example.
        special: how many special tokens an example has beside the text's.
        draws: whether the places depend on the random numbers.
    """

    places: Callable[[SentenceTokens, int, Random], Iterator[tuple[int, int, int, int]]]
    example: Callable[[Sequence[int], tuple[int, int, int, int], SpecialTokens], Any]
    special: int
    draws: bool


PLANS = {
    "full-sentences": Plan(full_sentence_places, block, 2, False),
    "doc-sentences": Plan(doc_sentence_places, block, 2, False),
    "segment-pairs": Plan(segment_pair_places, segment_pair, 3, True),
}
