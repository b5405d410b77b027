"""The task of sparse embedding (SPLADE): weights of the vocabulary's tokens, learnt from queries and their texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data.pairs import (
    PairExample,
    TextPairs,
    collate_pairs,
    encode_pairs,
    read_pairs,
)
from fastenc.models import SparseEncoder
from fastenc.packing import ModelArguments
from fastenc.tasks.metrics import sparse_retrieval_metrics
from fastenc.tasks.ranking_metrics import METRICS, require_trec_eval
from fastenc.tasks.shared_options import QUOTING, TOKENS_AT_ONCE, check_tokens_at_once
from fastenc.tasks.text_pairs import TextPairTask


@dataclass(frozen=True)
class SparseEmbedding(TextPairTask[SparseEncoder]):
    """Weights of tokens whose dot product says how well a text answers a query.

    The loss selects each query's partner among the partners and hard negatives of its micro-batch, by the dot products,
    with ``gather`` also among those of the other processes.
    The FLOPS regularisers make most weights 0; their factors grow with the square of the steps during the warm-up.

    Predictions are the weights of the pairs' texts, sparse: (pairs, texts of a pair, vocabulary). Files of predictions
    contain the dot products.
    """

    name = "sparse-embedding"
    model_class = SparseEncoder
    of_texts = "SparseEncoder.encode_sparse gives the weights of texts"

    max_length: int | None = option(
        None,
        "Longest text in tokens; longer ones are cut. Default: as the checkpoint says, else its number of positions.",
        predict=True,
    )
    text: tuple[str, ...] = option(
        ("sentence1", "sentence2"),
        "Columns of a query, its partner and, optionally, a hard negative.",
        "-t",
        predict=True,
    )
    quoting: str | None = option(None, QUOTING, predict=True)
    pooling: str | None = option(
        None,
        "How the tokens' weights become a text's: max or sum. Default: as the checkpoint says, else max.",
    )
    scale: float = option(1.0, "Factor on similarities in the loss, the inverse of a temperature.")
    query_flops: float = option(5e-5, "Weight of the FLOPS regulariser of the queries.")
    document_flops: float = option(3e-5, "Weight of the FLOPS regulariser of the other texts.")
    flops_warmup: int = option(
        0, "Number of training batches in which the regularisers' weights grow from 0."
    )
    gather: bool = option(
        False,
        "Texts of the other processes' micro-batches are negatives too, and count in the FLOPS regularisers.",
    )
    tokens_at_once: int | None = option(None, TOKENS_AT_ONCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tokens_at_once(self.tokens_at_once)
        if self.flops_warmup < 0:
            raise ValueError(f"flops_warmup must be at least 0, got {self.flops_warmup}")

    def read(self, path: str | Path, train: TextPairs | SparseEncoder | None = None) -> TextPairs:
        text = self.text
        if train is not None:  # the data are for metrics, which are missed before the training
            require_trec_eval()
            text = self.columns_of_metrics(path)
        return read_pairs(path, text, quoting=self.quoting)

    def model_options(self, train: TextPairs) -> JsonObject:
        names = ("pooling", "max_length", "scale", "query_flops", "document_flops", "gather")
        return {name: getattr(self, name) for name in names}

    def metrics(self, data: TextPairs) -> tuple[str, ...]:
        return (*METRICS, "active_tokens", "loss")

    def encode(self, data: TextPairs, model: SparseEncoder) -> list[PairExample]:
        return encode_pairs(data, model.own_tokenizer(), self.room(model))

    def collate(self, examples: Sequence[PairExample]) -> ModelArguments:
        return collate_pairs(examples, self.tokens_at_once)

    def collate_step(self, examples: Sequence[PairExample], step: int) -> ModelArguments:
        arguments = self.collate(examples)
        if step < self.flops_warmup:
            arguments["flops_share"] = torch.tensor((step / self.flops_warmup) ** 2)
        return arguments

    def keep(self, logits: Tensor) -> Tensor:
        return logits.float().to_sparse()  # few weights of a text are not 0

    def decode(
        self,
        model: SparseEncoder,
        data: TextPairs,
        examples: Sequence[PairExample],
        logits: list[Tensor],
    ) -> Tensor:
        if not logits:
            return torch.empty((0, 2, model.config.vocab_size)).to_sparse()
        return torch.stack(logits)

    def similarities(self, predictions: Tensor) -> list[float]:
        """The dot product of each query and its partner."""
        products = predictions.select(1, 0) * predictions.select(1, 1)
        return products.sum(1).to_dense().tolist()

    def score(self, model: SparseEncoder, data: TextPairs, predictions: Tensor) -> dict[str, float]:
        pairs, texts, vocabulary = predictions.shape
        weights = predictions.coalesce()
        pair, text, token = weights.indices()
        rows = torch.stack([pair * texts + text, token])
        size = (pairs * texts, vocabulary)
        with torch.sparse.check_sparse_tensor_invariants():
            flat = torch.sparse_coo_tensor(rows, weights.values(), size).coalesce()
        active = weights.values().count_nonzero() / max(1, pairs * texts)
        metrics = sparse_retrieval_metrics(data.texts, flat)
        return {**metrics, "active_tokens": float(active)}

    def room(self, model: SparseEncoder) -> int:
        limit = model.max_tokens
        return limit if self.max_length is None else min(self.max_length, limit)
