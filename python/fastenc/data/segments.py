"""Pairs of neighbouring segments of running text, for next-sentence and sentence-order prediction."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from fastenc.data.blocks import Extent, check_block_size
from fastenc.data.sentences import SentenceTokens, tokenize_documents
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_like import TokenizerLike

SHORT_PROBABILITY = 0.1  # of a random shorter length, as in BERT
NO_PAIR = (
    "a pair needs a document of at least two sentences, got none: give longer documents, or choose an objective "
    "without pairs"
)


class SegmentPair(NamedTuple):
    """[CLS] first [SEP] second [SEP]: two segments in the order of their document.

    Fields:
        ids: array of 4-byte token ids.
        split: index in ``ids`` of the first [SEP].
        document: number of the document; documents without tokens are not counted.
    """

    ids: array
    split: int
    document: int

    @property
    def first(self) -> array:
        """The first segment's ids, without special tokens."""
        return self.ids[1 : self.split]

    @property
    def second(self) -> array:
        """The second segment's ids, without special tokens."""
        return self.ids[self.split + 1 : -1]


def segment_pairs(
    documents: Iterable[str],
    tokenizer: TokenizerLike,
    block_size: int = 512,
    *,
    seed: int = 0,
    show_progress: bool | None = None,
) -> list[SegmentPair]:
    """Pairs of contiguous segments. Both segments consist of whole sentences of one document.

    A document's sentences are collected until the next one does not fit, and divided at the end of a random sentence.
    One pair in ten gets a random shorter length, so that the model sees short inputs too. A sentence longer than half
    of a pair is split. A single sentence that is left at a document's end is dropped, because it has no neighbour.

    Args:
        documents: texts; sentences end as in :func:`fastenc.data.full_sentence_blocks`.
        tokenizer: a ``tokenizers.Tokenizer``.
        block_size: largest number of tokens of a pair, special tokens included.
        seed: seed of the random lengths and divisions.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError for a block_size below 8, or if no document has two sentences.
    Source: SEGMENT-PAIR in Liu et al. 2019, arXiv:1907.11692, after Devlin et al. 2018, arXiv:1810.04805.
    """
    check_block_size(block_size)
    special = special_tokens(tokenizer)
    text = tokenize_documents(documents, tokenizer, show_progress=show_progress)
    extents = segment_pair_extents(text, block_size - 3, Random(seed))
    pairs = [segment_pair(text.tokens, extent, special) for extent in extents]
    if not pairs:
        raise ValueError(NO_PAIR)
    return pairs


def segment_pair_extents(text: SentenceTokens, room: int, rng: Random) -> Iterator[Extent]:
    """(start, split, stop, document) of each pair: its segments are the tokens [start, split) and [split, stop)."""
    next_limit = lambda: rng.randint(2, room) if rng.random() < SHORT_PROBABILITY else room
    begin = first = 0
    for number, end in enumerate(text.document_ends):
        last = bisect_right(text.sentence_ends, end, first)
        ends: list[int] = []  # of the sentences collected for the current pair
        limit = next_limit()
        for sentence_end in _split_ends(begin, text.sentence_ends[first:last], room // 2):
            if len(ends) >= 2 and sentence_end - begin > limit:
                yield begin, rng.choice(ends[:-1]), ends[-1], number
                begin, ends, limit = ends[-1], [], next_limit()
            ends.append(sentence_end)
        if len(ends) >= 2:
            yield begin, rng.choice(ends[:-1]), ends[-1], number
        begin, first = int(end) + 1, last


def segment_pair(tokens: Sequence[int], extent: Extent, special: SpecialTokens) -> SegmentPair:
    """The pair with this extent."""
    start, split, stop, document = extent
    first, second = tokens[start:split], tokens[split:stop]
    ids = array("i", [special.cls, *first, special.sep, *second, special.sep])
    return SegmentPair(ids, split - start + 1, document)


def _split_ends(start: int, sentence_ends: Sequence[int], longest: int) -> Iterator[int]:
    """The ends of the sentences after sentences of more than ``longest`` tokens are split."""
    for end in map(int, sentence_ends):
        while end - start > longest:
            start += longest
            yield start
        yield end
        start = end
