"""Encodes sentences of words as token ids."""

import warnings
from collections.abc import Iterator, Sequence
from typing import cast

from fastenc._base.progress import progress_bar
from fastenc.data.columns import Sentence, place_of
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import tokenizer_for_words

SENTENCES_AT_ONCE = 1000  # number of sentences in a call of the tokenizer
Tokens = list[tuple[int, int]]  # (index of the word, token id) of each token of a sentence


def tokens_of_words(
    sentences: Sequence[Sentence],
    path: str,
    tokenizer: TokenizerLike,
    show_progress: bool | None = None,
) -> Iterator[Tokens]:
    """The tokens of each sentence, without special tokens.

    A word without any token (a single joiner or variation selector) becomes the unknown token. After the last sentence
    a warning names the first such word and its line in ``path``.
    """
    unknown, word_tokenizer = special_tokens(tokenizer).unk, tokenizer_for_words(tokenizer)
    vanished: list[str] = []
    begins = range(0, len(sentences), SENTENCES_AT_ONCE)
    for begin in progress_bar(begins, "encoding", "batch", show_progress):
        batch = sentences[begin : begin + SENTENCES_AT_ONCE]
        encodings = word_tokenizer.encode_batch(
            [each.words for each in batch], is_pretokenized=True, add_special_tokens=False
        )
        for each, encoding in zip(batch, encodings, strict=True):
            # Without special tokens every token belongs to a word.
            words = cast(list[int], encoding.word_ids)
            tokens = list(zip(words, encoding.ids, strict=True))
            for word in sorted({*range(len(each.words))} - {*words}):
                tokens.append((word, unknown))
                vanished.append(
                    f"{place_of(path, each.lines[word])}: the word {each.words[word]!r}"
                )
            tokens.sort(key=lambda token: token[0])  # stable: a word's subwords keep their order
            yield tokens
    if vanished:
        others = f", and neither have {len(vanished) - 1} others" if len(vanished) > 1 else ""
        warnings.warn(
            f"{vanished[0]} has no tokens{others}. It is read as the unknown token. Remove such words if they "
            "are a mistake",
            stacklevel=3,
        )


def check_room(max_length: int) -> None:
    """Raises: ValueError if a window of ``max_length`` tokens has no room beside the special tokens."""
    if max_length < 3:
        raise ValueError(
            f"max_length must leave room beside 2 special tokens, got {max_length}: give more"
        )
