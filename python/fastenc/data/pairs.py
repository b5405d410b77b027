"""Pairs of texts, with or without a similarity score, as token ids and batches."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch

from fastenc.data.classification import check_tokens, encode_texts
from fastenc.data.readers import number_of, text_of
from fastenc.data.rows import numbered_rows
from fastenc.packing import ModelArguments, pack_sequences, token_groups
from fastenc.text.tokenizer_like import TokenizerLike


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts.

    Fields:
        texts: (text, partner) of each pair, or (text, partner, hard negative).
        scores: similarity of each pair, from 0 (or -1) to 1; empty if the file has no scores.
        highest: the file's scores were divided by this one, so that it became 1.
        where: file and line of each pair, for error messages; may be empty.
    """

    texts: list[tuple[str, ...]]
    scores: list[float]
    highest: float = 1.0
    where: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.texts)


class PairExample(NamedTuple):
    """The texts of a pair, ready for the model.

    Fields:
        texts: the token ids of each text.
        text_ids: a number for each text. Texts with the same tokens, prompts left out, have the same number in every
            process.
        score: the pair's score, or None.
        teacher: a teacher's scores of the text with its partner and with its hard negative, or None.
        guide: (texts, width), another model's vectors of the texts, or None.
    """

    texts: tuple[list[int], ...]
    text_ids: tuple[int, ...]
    score: float | None
    teacher: list[float] | None = None
    guide: torch.Tensor | None = None

    @property
    def input_ids(self) -> list[int]:
        """The ids of all texts, one after another; their number is the example's length in a batch."""
        return list(chain.from_iterable(self.texts))


def read_pairs(
    path: str | Path,
    columns: Sequence[str] = ("sentence1", "sentence2"),
    similarity: str | None = None,
    highest: float | None = None,
    quoting: str | None = None,
) -> TextPairs:
    """Pairs of texts from a table, as :func:`fastenc.data.read_labelled` reads it.

    Args:
        columns: names of the columns of a text, its partner and, without ``similarity``, optionally a hard negative.
        similarity: name of the column of the pairs' scores; None: the pairs have no scores.
        highest: the score of two texts with the same meaning; None: the largest in the file.
        quoting: of a TSV file, see :func:`fastenc.data.rows.numbered_rows`.
    Raises: ValueError for another number of columns, and with file and line for a malformed file or a score whose
        absolute value is above ``highest``.
    """
    if similarity is None:
        rows = list(_numbered_pairs(path, columns, quoting))
        return TextPairs([pair for _, pair in rows], [], where=[where for where, _ in rows])
    _check_columns(columns, (2,))
    texts, scores = [], []
    for where, row in numbered_rows(path, [*columns, similarity], quoting):
        texts.append(tuple(text_of(row, name, where) for name in columns))
        scores.append((where, number_of(row[similarity], where)))
    top = max(value for _, value in scores) if highest is None else highest
    if not (top > 0 and math.isfinite(top)):
        raise ValueError(
            f"{path}: the highest score must be positive, got {top}: give highest_similarity the score of two texts "
            "with the same meaning"
        )
    for where, value in scores:
        if abs(value) > top:
            raise ValueError(
                f"{where}: the absolute value of a score must be at most {top}, the highest in the training set or "
                f"highest_similarity, got {value}: correct it, or give a larger highest_similarity"
            )
    lines = [where for where, _ in scores]
    return TextPairs(texts, [value / top for _, value in scores], top, lines)


def iterate_pairs(
    path: str | Path,
    columns: Sequence[str] = ("sentence1", "sentence2"),
    quoting: str | None = None,
) -> Iterator[tuple[str, ...]]:
    """The texts of :func:`read_pairs`, one pair at a time, without scores."""
    return (pair for _, pair in _numbered_pairs(path, columns, quoting))


def _numbered_pairs(
    path: str | Path, columns: Sequence[str], quoting: str | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    _check_columns(columns, (2, 3))
    for where, row in numbered_rows(path, columns, quoting):
        yield where, tuple(text_of(row, name, where) for name in columns)


def _check_columns(columns: Sequence[str], allowed: tuple[int, ...]) -> None:
    if len(columns) not in allowed:
        raise ValueError(
            "text must name the columns of a text, its partner and, without similarity scores, optionally a hard "
            f"negative, got {list(columns)}: name two columns, or use fastenc embed for single texts"
        )


def encode_pairs(
    data: TextPairs,
    tokenizer: TokenizerLike,
    max_length: int,
    prompts: tuple[str, str] = ("", ""),
) -> list[PairExample]:
    """Token ids of each text, truncated to ``max_length`` tokens, special tokens included.

    Args:
        prompts: what is put before the first text of each pair, and before its other texts.
    Raises: ValueError for a text without tokens of its own, if the data have ``scores`` or ``where``; with file and
        line if they have ``where``.
    """
    texts = list(chain.from_iterable(data.texts))
    encode = lambda each: [e.input_ids for e in encode_texts(each, tokenizer, max_length)]
    encoded = encode(texts)
    if data.scores or data.where:
        # One entry a text; empty if the pairs' lines are not known.
        where = [line for line, row in zip(data.where, data.texts, strict=False) for _ in row]
        check_tokens(encoded, tokenizer.num_special_tokens_to_add(False), texts, where)
    text_ids = map(_text_id, encoded)  # of the texts alone
    if any(prompts):
        first, rest = prompts
        rows = ((first + text, *(rest + each for each in others)) for text, *others in data.texts)
        encoded = encode([*chain.from_iterable(rows)])
    ids = iter(encoded)
    scores: Sequence[float | None] = data.scores or [None] * len(data)
    return [
        PairExample(tuple(islice(ids, len(row))), tuple(islice(text_ids, len(row))), score)
        for row, score in zip(data.texts, scores, strict=True)
    ]


def collate_pairs(
    examples: Sequence[PairExample], tokens_at_once: int | None = None
) -> ModelArguments:
    """The model's arguments.

    Args:
        tokens_at_once: largest number of tokens in a group of texts; None: no groups.
    Returns: {"batch": PackedBatch of the examples' texts, one after another,
        "text_ids": int64 (examples, texts of an example), see :class:`PairExample`,
        "labels": float32 (examples,) scores, or (examples, 2) a teacher's scores; without either int64 (examples,), the
            index of each text's partner,
        "groups": the groups, with ``tokens_at_once``,
        "guide": (examples, texts of an example, width), if the examples have another model's vectors}.
    """
    flat = list(chain.from_iterable(example.texts for example in examples))
    scores = [each for each in (e.teacher or e.score for e in examples) if each is not None]
    labels = torch.tensor(scores, dtype=torch.float32) if scores else torch.arange(len(examples))
    arguments: ModelArguments = {
        "batch": pack_sequences(flat),
        "text_ids": torch.tensor([example.text_ids for example in examples]),
        "labels": labels,
    }
    if tokens_at_once is not None:
        arguments["groups"] = token_groups(map(len, flat), tokens_at_once)
    guides = [example.guide for example in examples if example.guide is not None]
    if guides:
        arguments["guide"] = torch.stack(guides)
    return arguments


def _text_id(ids: Sequence[int]) -> int:
    """A hash of 64 bits: two different texts have the same one with a probability of 5e-20."""
    digest = blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
