"""Vectors of texts, learnt from texts that belong together or from scores of similarity."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._options import option
from fastenc.data.pairs import (
    PairExample,
    TextPairs,
    collate_pairs,
    encode_pairs,
    iterate_pairs,
    read_pairs,
)
from fastenc.data.readers import in_parts
from fastenc.data.writers import json_lines, table_lines
from fastenc.models import SentenceEmbedder
from fastenc.tasks.base import QUOTING, Task
from fastenc.tasks.metrics import regression_metrics, retrieval_metrics
from fastenc.tasks.summary import number_range


@dataclass(frozen=True)
class SentenceEmbedding(Task):
    """Vectors whose cosine similarity tells how alike texts are.

    Without ``similarity`` a text must find its partner among those of its batch (and the hard negatives), so that
    larger batches are harder; equal texts are no negatives of one another. Each micro-batch and each process has its
    own candidates: accumulation and more processes do not add any. With ``similarity``, cosine similarities are to be
    ranked as the scores are, or to equal them.

    Predictions are vectors (pairs, texts a pair, hidden_size); files of them hold similarities.
    """

    name = "sentence-embedding"
    model_class = SentenceEmbedder

    max_length: int | None = option(
        None,
        "Longest text in tokens; longer ones are cut. Default: what the checkpoint declares, else its positions.",
        predict=True,
    )
    text: tuple[str, ...] = option(
        ("sentence1", "sentence2"),
        "Columns of a text, its partner and perhaps a hard negative.",
        "-t",
        predict=True,
    )
    quoting: str | None = option(None, QUOTING, predict=True)
    similarity: str | None = option(
        None, "Column of the pairs' scores; not given: pairs that belong together."
    )
    highest_similarity: float | None = option(
        None, "Score of texts that mean the same; not given: the highest there is."
    )
    similarity_loss: str = option(
        "cosent", "With scores: cosent (ranks pairs), or cosine (squared error of the similarity)."
    )
    pooling: str | None = option(
        None, "cls, mean, max or last-four. Default: what the checkpoint declares, else mean."
    )
    scale: float = option(20.0, "Factor on similarities, the inverse of a temperature.")
    symmetric: bool = option(False, "Partners must find their texts, too.")

    def read(self, path: str | Path, train: TextPairs | None = None) -> TextPairs:
        highest = self.highest_similarity
        if highest is None and isinstance(train, TextPairs) and train.scores:
            highest = train.highest
        return read_pairs(path, self.text, self.similarity, highest, self.quoting)

    def data_of(self, inputs: Sequence[Any]) -> TextPairs:
        """Pairs of texts."""
        for index, each in enumerate(inputs):
            if isinstance(each, str) or len(each) != 2 or not all(isinstance(t, str) for t in each):
                raise ValueError(
                    f"input {index} must be a pair of texts, whose similarity is predicted, got {each!r}: "
                    "Encoder.encode gives the vectors of texts"
                )
        return TextPairs([tuple(each) for each in inputs], [])

    def describe_labels(self, data: TextPairs) -> str:
        return f"{self.similarity}: {number_range(data.scores)}" if data.scores else ""

    def options_to_keep(self, train: TextPairs) -> dict[str, Any]:
        highest = {"highest_similarity": train.highest} if train.scores else {}
        return super().options_to_keep(train) | highest

    def read_inputs(self, path: str | Path) -> TextPairs:
        # Without the hard negative of training.
        return TextPairs(list(iterate_pairs(path, self.text[:2], self.quoting)), [])

    def input_parts(self, path: str | Path, size: int) -> Iterator[TextPairs]:
        for texts in in_parts(iterate_pairs(path, self.text[:2], self.quoting), size):
            yield TextPairs(texts, [])

    def model_options(self, train: TextPairs) -> dict[str, Any]:
        names = ("pooling", "max_length", "similarity_loss", "scale", "symmetric")
        return {name: getattr(self, name) for name in names}

    def metrics(self, train: TextPairs) -> tuple[str, ...]:
        return ("spearman", "pearson", "loss") if train.scores else ("mrr", "recall@1", "loss")

    def encode(self, data: TextPairs, model: SentenceEmbedder) -> list[PairExample]:
        return encode_pairs(data, model.tokenizer, self.room(model))

    def collate(self, examples: Sequence[PairExample]) -> dict[str, Any]:
        return collate_pairs(examples)

    def decode(self, model, data, examples, logits: list[Tensor]) -> Tensor:
        return torch.stack(logits) if logits else torch.empty((0, 2, model.config.hidden_size))

    def similarities(self, predictions: Tensor) -> list[float]:
        """The cosine similarity of each pair."""
        return F.cosine_similarity(predictions[:, 0], predictions[:, 1], dim=1).tolist()

    def score(self, model, data: TextPairs, predictions: Tensor) -> dict[str, float]:
        if data.scores:
            return regression_metrics(self.similarities(predictions), data.scores)
        return retrieval_metrics(data.texts, predictions)

    def lines(self, model, data, predictions: Tensor, suffix: str) -> Iterable[str]:
        rows = [{"similarity": value} for value in self.similarities(predictions)]
        return table_lines(rows) if suffix == ".tsv" else json_lines(rows)

    def room(self, model: SentenceEmbedder) -> int:
        limit = model.encoder.max_tokens
        return min(self.max_length or limit, limit)
