"""Texts as packed batches of similar lengths, tokenised beside the computation of the batches before."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastenc._base.prefetch import prefetch
from fastenc.packing import PackedBatch, check_batch_size, length_sorted_batches, pack_sequences
from fastenc.text.tokenizer_like import TokenizerLike

BATCHES_AT_ONCE = 16  # batches whose texts are tokenised and sorted by length together
TextBatch = tuple[list[int], PackedBatch]  # numbers of the texts, and their tokens


@dataclass(frozen=True)
class TextBatches:
    """Makes packed batches of texts.

    Args:
        tokenizer: without padding and truncation.
        max_length: number of tokens to which a text is cut, special tokens included.
        batch_size: texts in a batch.
        prompt: put before each text.
    Raises: ValueError for a batch_size below 1, and a max_length below the number of special tokens.
    """

    tokenizer: TokenizerLike
    max_length: int
    batch_size: int = 32
    prompt: str = ""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        special = self.tokenizer.num_special_tokens_to_add(False)
        if self.max_length < special:
            raise ValueError(
                f"max_tokens must be at least {special}, the number of a text's special tokens, got {self.max_length}: "
                "set encoder.max_tokens"
            )

    def number(self, texts: int) -> int:
        """The number of batches that ``texts`` texts make."""
        return -(-texts // self.batch_size)

    def of_part(self, texts: Sequence[str], first: int = 0) -> list[TextBatch]:
        """The batches of some texts, the longest first. ``first``: number of the first text.

        Raises: ValueError for what is no text, and for a text without tokens.
        """
        prompted = [self.prompt + text for text in checked_texts(texts)]
        ids = tokenize(prompted, self.tokenizer, self.max_length)
        if [] in ids:  # the tokenizer adds no special tokens
            index = ids.index([])
            raise ValueError(
                f"encode takes texts with at least one token, got {texts[index]!r} as text {first + index}: leave it "
                "out"
            )
        return [
            ([first + index for index in chosen], pack_sequences([ids[index] for index in chosen]))
            for chosen in length_sorted_batches([len(each) for each in ids], self.batch_size)
        ]

    def of(self, texts: Sequence[str]) -> Iterator[TextBatch]:
        """The batches of all texts. While the caller computes, another thread tokenises the next ones."""
        size = BATCHES_AT_ONCE * self.batch_size
        parts = [(texts[start : start + size], start) for start in range(0, len(texts), size)]
        make = lambda part: self.of_part(*part)
        # The first part has to be waited for, so a thread for it alone would only cost time.
        return chain.from_iterable(prefetch(make, parts) if len(parts) > 1 else map(make, parts))


def checked_texts(texts: str | Sequence[str]) -> list[str]:
    """The texts as a list. Raises: ValueError for what is not a text, or cannot be written as UTF-8."""
    rule = "encode takes a text or a list of texts"
    listed = [texts] if isinstance(texts, str) else items_of(texts, rule)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise ValueError(f"encode takes texts, got {text!r} as text {index}: leave it out")
        if (character := lone_surrogate(text)) is not None:
            raise ValueError(
                f"encode takes texts that can be written as UTF-8, got half a surrogate pair, "
                f"{text[character]!r}, at character {character} of text {index}: remove it"
            )
    return listed


def items_of(values: Iterable[Any], rule: str) -> list[Any]:
    """The items as a list.

    Raises: ValueError, which begins with ``rule``, for what has no items, and for a dictionary, a pandas DataFrame or
        another table. The items of a dictionary are its keys, and those of a DataFrame the names of its columns.
    """
    dimensions = getattr(values, "ndim", 1)
    if not isinstance(values, Iterable) or isinstance(values, Mapping) or dimensions != 1:
        of = "" if dimensions == 1 else f" of {dimensions} dimensions"
        raise ValueError(f"{rule}, got {type(values).__name__}{of}: give a list of texts")
    return list(values)


def lone_surrogate(text: str) -> int | None:
    """The index of the first half of a surrogate pair, which no encoding of Unicode can hold; None: there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def tokenize(texts: list[str], tokenizer: TokenizerLike, max_length: int) -> list[list[int]]:
    """The token ids of each text, at most ``max_length`` with the special tokens, which are kept if a text is cut."""
    room = max_length - tokenizer.num_special_tokens_to_add(False)
    ids = []
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts), strict=True):
        if len(encoding.ids) > max_length:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            encoding.truncate(room)
            encoding = tokenizer.post_process(encoding)
        ids.append(encoding.ids)
    return ids
