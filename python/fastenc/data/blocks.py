"""Cuts running text into blocks of full sentences for pretraining."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from fastenc.data.sentences import SentenceTokens, tokenize_documents
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_like import TokenizerLike

Extent = tuple[int, int, int, int]  # start, split, stop, document


def full_sentence_blocks(
    documents: Iterable[str],
    tokenizer: TokenizerLike,
    block_size: int = 512,
    *,
    show_progress: bool | None = None,
) -> list[array]:
    """Blocks of contiguous full sentences, each at most ``block_size`` tokens with its special tokens.

    A block is [CLS] sentences [SEP]; T5's tokenizers have no [CLS]. Where it crosses a document's end, another [SEP]
    separates the documents. A sentence longer than a block is split. Empty documents are skipped.

    Args:
        documents: texts; a sentence ends at . ! ? before white space, at 。！？, and at a line's end.
        tokenizer: a ``tokenizers.Tokenizer``.
        block_size: largest number of tokens of a block, special tokens included.
        show_progress: None shows a bar if stderr is a terminal.
    Returns: an array of 4-byte token ids for each block, which needs less memory than a list.
    Raises: ValueError for a block_size below 8, or if all documents are empty.
    Source: the FULL-SENTENCES format of Liu et al. 2019, arXiv:1907.11692.
    """
    return _blocks(full_sentence_extents, documents, tokenizer, block_size, show_progress)


def doc_sentence_blocks(
    documents: Iterable[str],
    tokenizer: TokenizerLike,
    block_size: int = 512,
    *,
    show_progress: bool | None = None,
) -> list[array]:
    """Like :func:`full_sentence_blocks`, but no block crosses a document's end; the last block of each is shorter.

    Source: the DOC-SENTENCES format of Liu et al. 2019, arXiv:1907.11692.
    """
    return _blocks(doc_sentence_extents, documents, tokenizer, block_size, show_progress)


def full_sentence_extents(text: SentenceTokens, room: int, rng: Random) -> Iterator[Extent]:
    """(start, 0, stop, document) of each block: its tokens are [start, stop), and it begins in this document."""
    return _extents(text, room, across_documents=True)


def doc_sentence_extents(text: SentenceTokens, room: int, rng: Random) -> Iterator[Extent]:
    """Like :func:`full_sentence_extents`, but no block crosses a document's end."""
    return _extents(text, room, across_documents=False)


def block(tokens: Sequence[int], extent: Extent, special: SpecialTokens) -> array:
    """[CLS] tokens [SEP] as an array of 4-byte ids."""
    start, _, stop, _ = extent
    return array("i", [*special.begin, *tokens[start:stop], special.sep])


def text_of_block(ids: Sequence[int], special: SpecialTokens) -> Sequence[int]:
    """The ids of a block without the special tokens at its ends."""
    return ids[len(special.begin) : -1]


def check_block_size(block_size: int) -> None:
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8 tokens, got {block_size}: give more")


def _blocks(extents, documents, tokenizer, block_size, show_progress) -> list[array]:
    check_block_size(block_size)
    special = special_tokens(tokenizer)
    text = tokenize_documents(documents, tokenizer, show_progress=show_progress)
    room = block_size - len(special.begin) - 1
    blocks = [block(text.tokens, extent, special) for extent in extents(text, room, Random())]
    if not blocks:
        raise ValueError(
            "there is no text to pack, every document is empty: give documents with text"
        )
    return blocks


def _extents(text: SentenceTokens, room: int, across_documents: bool) -> Iterator[Extent]:
    sentences, documents = text.sentence_ends, text.document_ends
    start = document = 0
    while document < len(documents):
        last = bisect_right(sentences, start + room)
        stop = int(sentences[last - 1]) if last else 0
        if stop <= start:  # the sentence is longer than a block
            stop = start + room
        if not across_documents:
            stop = min(stop, int(documents[document]))
        yield start, 0, stop, document
        document = bisect_left(documents, stop, document)
        start = stop
        if document < len(documents) and documents[document] == stop:
            # A block that ends with its document adds its own [SEP].
            document, start = document + 1, stop + 1
