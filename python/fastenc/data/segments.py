"""Pairs of neighbouring segments of running text, for objectives that tell right pairs from wrong ones."""

from array import array
from collections.abc import Iterable
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from fastenc.data.blocks import split_sentences
from fastenc.data.progress import progress_bar
from fastenc.data.tokenizers import special_tokens

SHORT_PROBABILITY = 0.1


class SegmentPair(NamedTuple):
    """[CLS] first [SEP] second [SEP], as the two segments stand in their document.

    Fields:
        ids: array of 4-byte ids.
        split: place of the first [SEP].
        document: number of the document.
    """

    ids: array
    split: int
    document: int

    @property
    def first(self) -> array:
        return self.ids[1 : self.split]

    @property
    def second(self) -> array:
        return self.ids[self.split + 1 : -1]


def segment_pairs(
    documents: Iterable[str],
    tokenizer: Any,
    block_size: int = 512,
    *,
    seed: int = 0,
    show_progress: bool | None = None,
) -> list[SegmentPair]:
    """Pairs of contiguous segments, each of whole sentences of one document, at most ``block_size`` tokens together.

    A document's sentences are gathered until no further one fits (for one pair in ten, into a random shorter
    length, so that the model sees short inputs too) and parted at a random sentence. A sentence longer than half
    of a pair is split; one left alone at a document's end is left out, as it has no neighbour.

    Raises: ValueError for a block_size below 8, or no document of two sentences.
    Source: SEGMENT-PAIR in Liu et al. 2019, arXiv:1907.11692, after Devlin et al. 2018, arXiv:1810.04805.
    """
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8 tokens, got {block_size}: give more")
    special = special_tokens(tokenizer)
    draw, room = Random(seed), block_size - 3
    pairs: list[SegmentPair] = []

    def target() -> int:
        return draw.randint(2, room) if draw.random() < SHORT_PROBABILITY else room

    def close(pieces: list[list[int]], document: int) -> None:
        if len(pieces) < 2:
            return
        parted = draw.randrange(1, len(pieces))
        first, second = (
            list(chain.from_iterable(part)) for part in (pieces[:parted], pieces[parted:])
        )
        ids = array("i", [special.cls, *first, special.sep, *second, special.sep])
        pairs.append(SegmentPair(ids, len(first) + 1, document))

    texts = progress_bar(list(documents), "packing", "document", show_progress)
    for number, document in enumerate(texts):
        gathered: list[list[int]] = []
        size, limit = 0, target()
        encodings = tokenizer.encode_batch_fast(split_sentences(document), add_special_tokens=False)
        for encoding in encodings:
            for start in range(0, len(encoding.ids), room // 2):
                piece = encoding.ids[start : start + room // 2]
                if len(gathered) >= 2 and size + len(piece) > limit:
                    close(gathered, number)
                    gathered, size, limit = [], 0, target()
                gathered.append(piece)
                size += len(piece)
        close(gathered, number)
    if not pairs:
        raise ValueError(
            "there is no document of two sentences to make a pair of: give longer documents, or an objective "
            "without pairs"
        )
    return pairs
