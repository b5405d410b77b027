"""Changed copies of tokenizers, and words as tokens."""

import json
from itertools import accumulate
from typing import Any, cast

from fastenc.text.tokenizer_like import EncodingLike, TokenizerLike


def without_limits(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer without padding and truncation. The given tokenizer keeps its settings."""
    return _tokenizer_of(tokenizer, tokenizer.to_str())


def tokenizer_for_words(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer that tokenizes a single word as inside a text, with a space before it."""
    values = json.loads(tokenizer.to_str())
    outer = values["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    if parts[0].get("type") == "ByteLevel":
        parts[0]["add_prefix_space"] = True
    made = _tokenizer_of(tokenizer, json.dumps(values))
    if _separates_words(made):
        return made
    # Tokenizers whose first step splits words, as Qwen's, or makes another character of a space, as Gemma's.
    prefix = {"type": "Prepend", "prepend": " "}
    values["normalizer"] = _sequence([prefix, *_normalizers(values)])
    prefixed = _tokenizer_of(tokenizer, json.dumps(values))
    return prefixed if _separates_words(prefixed) else made


def _separates_words(tokenizer: TokenizerLike) -> bool:
    """Whether a word by itself has the tokens that it has after a space."""
    once, twice, word = (
        tokenizer.encode(text, is_pretokenized=isinstance(text, list), add_special_tokens=False).ids
        for text in ("a", "a a", ["a"])
    )
    return twice[len(once) :] == word


def lowercasing_tokenizer(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer that lowercases texts before all else, or the tokenizer if it lowercases already."""
    values = json.loads(tokenizer.to_str())
    if any(part["type"] == "Lowercase" or part.get("lowercase") for part in _normalizers(values)):
        return tokenizer
    values["normalizer"] = _sequence([{"type": "Lowercase"}, *_normalizers(values)])
    return _tokenizer_of(tokenizer, json.dumps(values))


def _normalizers(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the normalizer of a tokenizer.json."""
    outer = values["normalizer"] or _sequence([])
    return outer.get("normalizers", [outer])


def _sequence(normalizers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": normalizers}


def _tokenizer_of(original: TokenizerLike, content: str) -> TokenizerLike:
    """A tokenizer of the original's class with the content of a tokenizer.json, without padding and truncation."""
    made = type(original).from_str(content)
    made.no_padding()
    made.no_truncation()
    return made


def ids_and_starts(encoding: EncodingLike, count: int, unknown: int) -> tuple[list[int], list[int]]:
    """(token ids of a sentence, indices of each word's first token and of the end).

    Args:
        encoding: of the pre-tokenized sentence, without special tokens.
        count: number of words.
        unknown: the token id of a word for which the tokenizer gives no token.
    """
    # Without special tokens every token belongs to a word.
    ids, word_ids = encoding.ids, cast(list[int], encoding.word_ids)
    starts = [i for i, word in enumerate(word_ids) if i == 0 or word != word_ids[i - 1]]
    if len(starts) != count:
        tokens: list[list[int]] = [[] for _ in range(count)]
        for word, token in zip(word_ids, ids, strict=True):
            tokens[word].append(token)
        tokens = [of_word or [unknown] for of_word in tokens]
        ids = [token for of_word in tokens for token in of_word]
        starts = [0, *accumulate(map(len, tokens))][:-1]
    return ids, [*starts, len(ids)]
