"""Running text in blocks of full sentences for pretraining."""

import re
from array import array
from collections.abc import Iterable
from typing import Any

from fastenc.data.progress import progress_bar
from fastenc.data.tokenizers import special_tokens

# After a mark that ends a sentence, and before a line break.
SENTENCE_BREAK = re.compile(r"(?<=[.!?])(?=\s)|(?<=[。！？])|(?=\n)")


def full_sentence_blocks(
    documents: Iterable[str],
    tokenizer: Any,
    block_size: int = 512,
    *,
    show_progress: bool | None = None,
) -> list[array]:
    """Blocks of contiguous full sentences, each at most ``block_size`` tokens with its special tokens.

    A block is [CLS] sentences [SEP]; where it crosses a document's end, another [SEP] stands between. A sentence
    longer than a block is split. Empty documents leave no trace.

    Args:
        documents: texts; a sentence ends at . ! ? before white space, at 。！？, and at a line's end.
    Returns: arrays of 4-byte ids, a tenth of a list's memory.
    Raises: ValueError for a block_size below 8, or no text.
    Source: the FULL-SENTENCES format of Liu et al. 2019, arXiv:1907.11692.
    """
    return _blocks(documents, tokenizer, block_size, True, show_progress)


def doc_sentence_blocks(
    documents: Iterable[str],
    tokenizer: Any,
    block_size: int = 512,
    *,
    show_progress: bool | None = None,
) -> list[array]:
    """As :func:`full_sentence_blocks`, but no block crosses a document's end: the last one of each is shorter.

    Source: the DOC-SENTENCES format of Liu et al. 2019, arXiv:1907.11692.
    """
    return _blocks(documents, tokenizer, block_size, False, show_progress)


def _blocks(
    documents: Iterable[str],
    tokenizer: Any,
    block_size: int,
    across_documents: bool,
    show_progress: bool | None,
) -> list[array]:
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8 tokens, got {block_size}: give more")
    special = special_tokens(tokenizer)
    room = block_size - 2
    blocks: list[array] = []
    current: list[int] = []

    def close() -> None:
        while current and current[-1] == special.sep:
            current.pop()
        if current:
            blocks.append(array("i", [special.cls, *current, special.sep]))
            current.clear()

    for document in progress_bar(list(documents), "packing", "document", show_progress):
        sentences = split_sentences(document)
        for encoding in tokenizer.encode_batch_fast(sentences, add_special_tokens=False):
            ids = encoding.ids
            if len(current) + len(ids) > room:
                close()
            while len(ids) > room:
                blocks.append(array("i", [special.cls, *ids[:room], special.sep]))
                ids = ids[room:]
            current.extend(ids)
        if not across_documents:
            close()
        elif current and current[-1] != special.sep:
            current.append(special.sep)  # close() drops it where the block ends here
    close()
    if not blocks:
        raise ValueError("there is no text to pack: every document is empty")
    return blocks


def split_sentences(document: str) -> list[str]:
    """The sentences of a text; white space before one becomes a single space, so that their tokens, one sentence
    after another, are those of the running text."""
    parts = SENTENCE_BREAK.split(document.strip())
    return [re.sub(r"^\s+", " ", part.rstrip()) for part in parts if part.strip()]
