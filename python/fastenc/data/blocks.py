"""Full-sentence packing of running text for pretraining."""

from collections.abc import Iterable
from typing import Any

from fastenc.data.progress import progress_bar
from fastenc.data.tokenizers import special_tokens


def full_sentence_blocks(
    documents: Iterable[str],
    tokenizer: Any,
    block_size: int = 512,
    *,
    show_progress: bool | None = None,
) -> list[list[int]]:
    """Blocks of contiguous full sentences, each at most ``block_size`` tokens with its special tokens.

    A block is [CLS] sentences [SEP]; where it crosses a document's end, another [SEP] stands between. A
    document's lines are its sentences (or paragraphs); one that fits no block is split.

    Args:
        documents: texts whose sentences are separated by line breaks.
    Raises: ValueError for a block_size below 8, or no text.
    Source: the FULL-SENTENCES format of Liu et al. 2019, arXiv:1907.11692.
    """
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8 tokens, got {block_size}")
    special = special_tokens(tokenizer)
    room = block_size - 2
    blocks: list[list[int]] = []
    current: list[int] = []

    def close() -> None:
        while current and current[-1] == special.sep:
            current.pop()
        if current:
            blocks.append([special.cls, *current, special.sep])
            current.clear()

    for document in progress_bar(list(documents), "packing", "document", show_progress):
        sentences = [line for line in document.splitlines() if line.strip()]
        for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
            ids = encoding.ids
            if len(current) + len(ids) > room:
                close()
            while len(ids) > room:
                blocks.append([special.cls, *ids[:room], special.sep])
                ids = ids[room:]
            current.extend(ids)
        if current and len(current) < room:
            current.append(special.sep)
        else:
            close()
    close()
    if not blocks:
        raise ValueError("there is no text to pack: every document is empty")
    return blocks
