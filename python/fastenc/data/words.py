"""Words as token ids."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fastenc._progress import progress_bar
from fastenc.data.columns import Sentence
from fastenc.models.tokenizers import special_tokens, tokenizer_for_words

CHUNK = 1000  # sentences encoded at once
Tokens = list[tuple[int, int]]


def tokens_of_words(
    sentences: Sequence[Sentence], path: str, tokenizer: Any, show_progress: bool | None = None
) -> Iterator[Tokens]:
    """The tokens of each sentence, without special ones, as (index of the word, token id).

    A word without any token (a single joiner or variation selector) is read as the unknown token. After the last
    sentence a warning names the first such word and its line in ``path``.
    """
    unknown, word_tokenizer = special_tokens(tokenizer).unk, tokenizer_for_words(tokenizer)
    vanished: list[str] = []
    chunks = range(0, len(sentences), CHUNK)
    for begin in progress_bar(chunks, "encoding", "chunk", show_progress):
        chunk = sentences[begin : begin + CHUNK]
        encodings = word_tokenizer.encode_batch(
            [each.words for each in chunk], is_pretokenized=True, add_special_tokens=False
        )
        for each, encoding in zip(chunk, encodings, strict=True):
            tokens = list(zip(encoding.word_ids, encoding.ids, strict=True))
            for word in sorted({*range(len(each.words))} - {*encoding.word_ids}):
                tokens.append((word, unknown))
                vanished.append(f"line {each.lines[word]}: the word {each.words[word]!r}")
            tokens.sort(key=lambda token: token[0])  # stable: a word's subwords keep their order
            yield tokens
    if vanished:
        others = f", nor do {len(vanished) - 1} others" if len(vanished) > 1 else ""
        warnings.warn(
            f"{path}, {vanished[0]} leaves no token{others}: read as the unknown token. "
            "Remove such words if they are a mistake",
            stacklevel=3,
        )


def check_room(max_length: int) -> None:
    """Raises: ValueError if a window of ``max_length`` tokens has no room beside the special tokens."""
    if max_length < 3:
        raise ValueError(
            f"max_length must leave room beside 2 special tokens, got {max_length}: give more"
        )
