"""The ways to pack the running text of a token store into training examples."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from fastenc.data.blocks import block, doc_sentence_extents, full_sentence_extents
from fastenc.data.segments import segment_pair, segment_pair_extents
from fastenc.data.sentences import SentenceTokens
from fastenc.text.special_tokens import SpecialTokens


class PackingRule(NamedTuple):
    """How a packing finds its examples, and how it makes one.

    A store keeps an example as its extent (start, split, stop, document), and makes the example from the tokens when
    it is indexed.

    Fields:
        extents: function of (text, largest number of its tokens in an example, random generator) that yields the extent
            of each example.
        example: function of (tokens, extent, special tokens) that returns the example.
        separators: number of separators that are added to the text's tokens in an example, beside the token that begins
            it.
        is_random: whether the extents depend on the random generator.
    """

    extents: Callable[[SentenceTokens, int, Random], Iterator[tuple[int, int, int, int]]]
    example: Callable[[Sequence[int], tuple[int, int, int, int], SpecialTokens], Any]
    separators: int
    is_random: bool

    def added(self, special: SpecialTokens) -> int:
        """Number of special tokens that are added to the text's tokens in an example."""
        return len(special.begin) + self.separators


PACKING_RULES = {
    "full-sentences": PackingRule(full_sentence_extents, block, 1, False),
    "doc-sentences": PackingRule(doc_sentence_extents, block, 1, False),
    "segment-pairs": PackingRule(segment_pair_extents, segment_pair, 2, True),
}
