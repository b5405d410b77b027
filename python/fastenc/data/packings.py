"""The ways to cut running text into training examples."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from fastenc.data.blocks import block, doc_sentence_extents, full_sentence_extents
from fastenc.data.segments import segment_pair, segment_pair_extents
from fastenc.data.sentences import SentenceTokens
from fastenc.models.tokenizers import SpecialTokens


class Plan(NamedTuple):
    """How a packing finds its examples, and how it makes one.

    An example is stored as its extent, four numbers, and made from the tokens when it is asked for.

    Fields:
        extents: (text, block size, random numbers) → (start, split, stop, document) of each example.
        example: (tokens, extent, special tokens) → the example.
        special: number of special tokens that an example adds to the text's.
        is_random: whether the extents depend on the random numbers.
    """

    extents: Callable[[SentenceTokens, int, Random], Iterator[tuple[int, int, int, int]]]
    example: Callable[[Sequence[int], tuple[int, int, int, int], SpecialTokens], Any]
    special: int
    is_random: bool


PLANS = {
    "full-sentences": Plan(full_sentence_extents, block, 2, False),
    "doc-sentences": Plan(doc_sentence_extents, block, 2, False),
    "segment-pairs": Plan(segment_pair_extents, segment_pair, 3, True),
}
