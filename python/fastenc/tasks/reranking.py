"""The task of reranking: a cross-encoder that scores documents for a query."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data.ranking import (
    RankingData,
    RankingExample,
    collate_ranking,
    encode_ranking,
    iterate_candidates,
    read_ranking,
)
from fastenc.data.readers import in_parts
from fastenc.data.rows import numbered_rows
from fastenc.data.writers import json_lines, table_lines
from fastenc.models import CrossEncoder
from fastenc.models.heads.cross_encoder import ACTIVATIONS, BINARY, LOSSES
from fastenc.models.heads.relevance_losses import LIST_LOSSES, MARGIN
from fastenc.packing import ModelArguments
from fastenc.tasks.base import Task
from fastenc.tasks.ranking_metrics import METRICS, check_relevance, ranking_metrics
from fastenc.tasks.shared_options import QUOTING, TOKENS_AT_ONCE, check_tokens_at_once
from fastenc.tasks.summary import number_range


@dataclass(frozen=True)
class Reranking(Task[CrossEncoder, RankingData, RankingExample, list[list[float]]]):
    """The relevance of documents to a query, as :class:`fastenc.Reranker` uses it.

    Training data are (query, document, label) in each row, or a query with lists of its documents and their labels.
    With binary cross-entropy an example is a pair, with the other losses a query with all its candidates.

    Predictions are the scores of each query's documents.
    Raises: ValueError for an unknown loss, and for ``teacher`` with another loss than "margin-mse".
    """

    name = "rerank"
    model_class = CrossEncoder
    reads_first_token = True

    max_length: int | None = option(
        512, "Longest pair in tokens; its longer text is cut.", predict=True
    )
    query: str = option("query", "Column of the query.", predict=True)
    document: str = option(
        "document",
        "Column of the document. In .jsonl and data sets a row may hold a list of the query's documents.",
        predict=True,
    )
    label: str = option(
        "label", "Column of the relevance: a number, or a list with one for each document."
    )
    teacher: str | None = option(
        None, f"Column of a teacher's scores, with --loss {MARGIN}: a number, or a list."
    )
    loss: str = option(
        BINARY,
        "Loss: binary-cross-entropy of each pair, or over each query's candidates: cross-entropy (a softmax that "
        "selects the relevant ones), listnet, lambda (NDCG-Loss2++) or margin-mse (the margins of a teacher's scores).",
    )
    tokens_at_once: int | None = option(None, TOKENS_AT_ONCE, predict=True)
    quoting: str | None = option(None, QUOTING, predict=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss}: give one")
        if (self.teacher is None) == (self.loss == MARGIN):
            raise ValueError(
                f"loss {MARGIN} needs the column of a teacher's scores, and the other losses read none, got loss "
                f"{self.loss} with teacher {self.teacher}: give both, or neither"
            )
        check_tokens_at_once(self.tokens_at_once)

    @property
    def by_query(self) -> bool:
        return self.loss in LIST_LOSSES

    def read(
        self, path: str | Path, train: RankingData | CrossEncoder | None = None
    ) -> RankingData:
        teacher = self.teacher
        if teacher is not None and train is not None:
            # The metrics compare the order of the documents with the labels alone.
            _, first = next(numbered_rows(path, [self.query], self.quoting))
            teacher = teacher if teacher in first else None
        data = read_ranking(path, self.query, self.document, self.label, teacher, self.quoting)
        if train is not None:
            check_relevance(path, data.labels)
        labels = [*chain.from_iterable(data.labels)]
        if not self.by_query and not all(0 <= label <= 1 for label in labels):
            wrong = next(index for index, label in enumerate(labels) if not 0 <= label <= 1)
            raise ValueError(
                f"{data.where[wrong]}: labels of {BINARY} must be from 0 to 1, got {labels[wrong]:g}: correct it, or "
                f"give another loss ({', '.join(LIST_LOSSES)})"
            )
        if self.by_query and all(len({*row}) < 2 for row in data.labels):
            raise ValueError(
                f"{path}: loss {self.loss} compares a query's documents, but no query has two documents with different "
                f"labels: add documents, or give loss {BINARY}"
            )
        return data

    def read_inputs(self, path: str | Path) -> RankingData:
        return _inputs(iterate_candidates(path, self.query, self.document, self.quoting))

    def input_parts(self, path: str | Path, size: int) -> Iterator[RankingData]:
        rows = iterate_candidates(path, self.query, self.document, self.quoting)
        return map(_inputs, in_parts(rows, size))

    def data_of(self, inputs: Sequence[Any]) -> RankingData:
        """The data of (query, document) pairs, or of (query, list of documents)."""
        rows: list[tuple[str, list[str], bool]] = []
        for index, each in enumerate(inputs):
            pair: Any = each if isinstance(each, list | tuple) and len(each) == 2 else (None, None)
            listed = isinstance(pair[1], list | tuple)
            query, documents = pair[0], [*pair[1]] if listed else [pair[1]]
            if not documents or not all(isinstance(text, str) for text in (query, *documents)):
                raise ValueError(
                    f"input {index} must be (query, document) or (query, documents), got {each!r}: give texts"
                )
            rows.append((query, documents, listed))
        return _inputs(rows)

    def model_options(self, train: RankingData) -> JsonObject:
        return {"loss": self.loss}

    def metrics(self, data: RankingData) -> tuple[str, ...]:
        has_loss = self.teacher is None or data.teacher
        return (*METRICS, "loss") if has_loss else METRICS

    def describe_labels(self, data: RankingData) -> str:
        counts = [len(each) for each in data.documents]
        labels = number_range([*chain.from_iterable(data.labels)])
        return f"{sum(counts):,} pairs, {min(counts)} to {max(counts)} for a query; {self.label}: {labels}"

    def encode(self, data: RankingData, model: CrossEncoder) -> list[RankingExample]:
        by_query = self.by_query and bool(data.labels)  # without labels, batches of pairs
        return encode_ranking(data, model.own_tokenizer(), self.room(model), by_query=by_query)

    def sequence_lengths(self, example: RankingExample) -> list[int]:
        return [*map(len, example.pairs)]

    def collate(self, examples: Sequence[RankingExample]) -> ModelArguments:
        return collate_ranking(examples, by_query=self.by_query, tokens_at_once=self.tokens_at_once)

    def loss_items(self, arguments: ModelArguments) -> int:
        count = LIST_LOSSES[self.loss][1] if self.by_query else len
        return count(arguments["labels"])

    def logits_of(self, arguments: ModelArguments) -> list[int] | None:
        if "lists" not in arguments:
            return None
        return arguments["labels"].isfinite().sum(1).tolist()

    def decode(
        self,
        model: CrossEncoder,
        data: RankingData,
        examples: Sequence[RankingExample],
        logits: list[Tensor],
    ) -> list[list[float]]:
        flat = torch.cat([each.flatten() for each in logits]) if logits else torch.empty(0)
        scores = ACTIVATIONS[model.activation](flat)
        return [part.tolist() for part in scores.split([len(each) for each in data.documents])]

    def score(
        self, model: CrossEncoder, data: RankingData, predictions: list[list[float]]
    ) -> dict[str, float]:
        return ranking_metrics(predictions, data.labels)

    def lines(
        self, model: CrossEncoder, data: RankingData, predictions: list[list[float]], suffix: str
    ) -> Iterable[str]:
        if suffix == ".tsv":
            # Line n belongs to pair n of the input.
            return table_lines([{"score": score} for row in predictions for score in row])
        rows: list[dict[str, object]] = []
        for query, documents, scores in zip(data.queries, data.documents, predictions, strict=True):
            if data.lists:
                rows.append({"query": query, "documents": documents, "scores": scores})
            else:
                rows.append({"query": query, "document": documents[0], "score": scores[0]})
        return json_lines(rows)


def _inputs(rows: Iterable[tuple[str, list[str], bool]]) -> RankingData:
    kept = list(rows)
    return RankingData(
        [query for query, _, _ in kept],
        [documents for _, documents, _ in kept],
        [],
        [],
        lists=any(listed for _, _, listed in kept),
    )
