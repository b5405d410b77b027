"""Queries with candidate documents, as token ids and batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from fastenc.data.classification import check_tokens, encode_texts
from fastenc.data.readers import number_of, text_of
from fastenc.data.rows import Row, numbered_rows
from fastenc.packing import ModelArguments, pack_sequences, token_groups
from fastenc.text.tokenizer_like import TokenizerLike


@dataclass(frozen=True)
class RankingData:
    """Queries with their candidate documents.

    Fields:
        queries: the queries.
        documents: the candidates of each query.
        labels: the relevance of each candidate; empty if there are no labels.
        teacher: the teacher's score of each candidate; empty if there is no teacher.
        where: file and line of each candidate, for error messages; may be empty.
        lists: whether the file has a list of documents in each row, not a single document.
    """

    queries: list[str]
    documents: list[list[str]]
    labels: list[list[float]]
    teacher: list[list[float]]
    where: Sequence[str] = ()
    lists: bool = False

    def __len__(self) -> int:
        return len(self.queries)


class RankingExample(NamedTuple):
    """One pair, or a query with all its candidates, ready for the model.

    Fields:
        pairs: the token ids of each pair.
        token_type_ids: the types of their tokens.
        labels: the relevance of each pair, or None.
        teacher: the teacher's score of each pair, or None.
    """

    pairs: list[list[int]]
    token_type_ids: list[list[int]]
    labels: list[float] | None
    teacher: list[float] | None

    @property
    def input_ids(self) -> list[int]:
        """The ids of all pairs, one after another; their number is the example's length in a batch."""
        return list(chain.from_iterable(self.pairs))


def read_ranking(
    path: str | Path,
    query: str = "query",
    document: str = "document",
    label: str = "label",
    teacher: str | None = None,
    quoting: str | None = None,
) -> RankingData:
    """Labelled candidates from a table, as :func:`fastenc.data.read_labelled` reads it.

    A row has a document, its label and its teacher's score, or (in JSONL and data sets) a list of each. Rows of the
    same query are put together, in the order of the file.

    Args:
        query, document, label: names of the columns.
        teacher: name of the column of a teacher's scores; None: there are none.
        quoting: of a TSV file, see :func:`fastenc.data.rows.numbered_rows`.
    Raises: ValueError with file and line for a malformed file, a value of a wrong type, and lists of other lengths.
    """
    numbers = [label] if teacher is None else [label, teacher]
    candidates: dict[str, list[tuple[str, str, tuple[float, ...]]]] = {}
    lists = False
    for where, row in numbered_rows(path, [query, document, *numbers], quoting):
        documents, listed = _documents(row, document, where)
        lists = lists or listed
        columns = [
            _numbers(row, name, where, len(documents) if listed else None) for name in numbers
        ]
        rows = zip([where] * len(documents), documents, zip(*columns, strict=True), strict=True)
        candidates.setdefault(text_of(row, query, where), []).extend(rows)
    of_queries = list(candidates.values())
    return RankingData(
        list(candidates),
        [[text for _, text, _ in rows] for rows in of_queries],
        [[values[0] for _, _, values in rows] for rows in of_queries],
        [] if teacher is None else [[values[1] for _, _, values in rows] for rows in of_queries],
        [where for rows in of_queries for where, _, _ in rows],
        lists,
    )


def iterate_candidates(
    path: str | Path,
    query: str = "query",
    document: str = "document",
    quoting: str | None = None,
) -> Iterator[tuple[str, list[str], bool]]:
    """(query, documents, whether they are a list) of each row, without labels; rows are not put together."""
    for where, row in numbered_rows(path, [query, document], quoting):
        yield text_of(row, query, where), *_documents(row, document, where)


def _documents(row: Row, name: str, where: str) -> tuple[list[str], bool]:
    value = row[name]
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value, True
    raise ValueError(
        f"{where}: column {name!r} must hold a text or a list of texts, got {value!r}: correct it, or leave out the row"
    )


def _numbers(row: Row, name: str, where: str, count: int | None) -> list[float]:
    """The numbers in a column, one for each of ``count`` documents; None: for a single document."""
    value = row[name]
    if count is None:
        return [number_of(value, where)]
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(
            f"{where}: column {name!r} must hold a list with a number for each of the {count} documents, got {value!r}:"
            " correct it"
        )
    return [number_of(each, where) for each in value]


def encode_ranking(
    data: RankingData, tokenizer: TokenizerLike, max_length: int, *, by_query: bool
) -> list[RankingExample]:
    """Token ids of the pairs, each cut to ``max_length`` tokens at the end of its longer text.

    Args:
        by_query: an example is a query with all its candidates, else a single pair.
    Raises: ValueError, with file and line if the data have ``where``, for a labelled pair without tokens.
    """
    counts = [len(each) for each in data.documents]
    pairs = [
        (q, text) for q, texts in zip(data.queries, data.documents, strict=True) for text in texts
    ]
    encoded = encode_texts(pairs, tokenizer, max_length)
    if data.labels:
        special = tokenizer.num_special_tokens_to_add(True)
        check_tokens([each.input_ids for each in encoded], special, pairs, data.where)
    labels, teacher = ([*chain.from_iterable(each)] for each in (data.labels, data.teacher))
    examples, start = [], 0
    for count in counts if by_query else [1] * len(pairs):
        chosen = slice(start, start + count)
        examples.append(
            RankingExample(
                [each.input_ids for each in encoded[chosen]],
                [each.token_type_ids for each in encoded[chosen]],
                labels[chosen] or None,
                teacher[chosen] or None,
            )
        )
        start += count
    return examples


def collate_ranking(
    examples: Sequence[RankingExample], *, by_query: bool, tokens_at_once: int | None
) -> ModelArguments:
    """The model's arguments.

    Returns: {"batch": PackedBatch of the pairs,
        "groups": those of at most ``tokens_at_once`` tokens, unless that is None,
        "labels": float32 (pairs,); with ``by_query`` (queries, candidates), -inf where a query has fewer; absent
            without labels,
        "lists": with ``by_query`` and labels: int64 (queries, candidates), the pair of each candidate, 0 where there is
            none,
        "teacher": float32 (queries, candidates), if the examples have a teacher's scores}.
    """
    pairs = [pair for example in examples for pair in example.pairs]
    types = [each for example in examples for each in example.token_type_ids]
    arguments: ModelArguments = {
        "batch": pack_sequences(pairs, types),
    }
    if tokens_at_once is not None:
        arguments["groups"] = token_groups(map(len, pairs), tokens_at_once)
    labels = [example.labels for example in examples if example.labels is not None]
    if not labels:
        return arguments
    if not by_query:
        arguments["labels"] = torch.tensor([*chain.from_iterable(labels)], dtype=torch.float32)
        return arguments
    pair_indices = iter(range(len(pairs)))
    numbered = [[next(pair_indices) for _ in row] for row in labels]
    arguments["lists"] = _filled_up(numbered, 0, torch.int64)
    arguments["labels"] = _filled_up(labels, float("-inf"), torch.float32)
    teacher = [example.teacher for example in examples if example.teacher is not None]
    if teacher:
        arguments["teacher"] = _filled_up(teacher, 0.0, torch.float32)
    return arguments


def _filled_up(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], dtype=dtype)
