"""Sparse vectors of texts: a weight for each token of the vocabulary, most of them 0 (SPLADE)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.progress import progress_bar, unless_few
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.sentence_files import lowercased
from fastenc.models.embedding.splade_files import (
    SpladeSettings,
    is_splade,
    read_splade,
    write_splade,
)
from fastenc.models.embedding.text_batches import TextBatches, checked_texts
from fastenc.models.heads.masked_lm import MaskedLM
from fastenc.models.heads.similarity_losses import flops_loss, ranking_loss
from fastenc.models.outputs import ModelOutput
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.gather import rows_of_all
from fastenc.nn.token_groups import in_groups
from fastenc.ops import linear_segment_log_sum, linear_segment_max
from fastenc.packing import PackedBatch


class SparseEncoder(MaskedLM):
    """A masked-LM model that gives each text a weight for every token of the vocabulary.

        weight[v] = max_t log(1 + relu(logit[t, v])),   or the sum over the text's tokens t

    The logits of all tokens are never formed (:func:`fastenc.ops.linear_segment_max`). Texts are compared by the dot
    product of their weights. Folders have sentence-transformers' files of a SparseEncoder.

    Args:
        pooling: "max" or "sum". None: as the checkpoint says, else "max".
        max_length: number of tokens to which texts are cut. None: as the checkpoint says, else the model's positions.
        scale: factor of the dot products in the ranking loss.
        query_flops, document_flops: weights of the FLOPS regularisers of a pair's texts and of their partners with the
            hard negatives (:func:`fastenc.models.heads.similarity_losses.flops_loss`).
        gather: in training, the texts of the other processes are candidates in the ranking loss, and count in the means
            of the FLOPS regularisers.
    Raises: ValueError naming the argument, the rule and the value.
    Source: Formal et al. 2021, arXiv:2107.05720 (sum) and arXiv:2109.10086 (max).
    """

    loss_ignores_padding = False

    def __init__(
        self,
        config: EncoderConfig,
        pooling: str | None = None,
        max_length: int | None = None,
        scale: float = 1.0,
        query_flops: float = 0.0,
        document_flops: float = 0.0,
        gather: bool = False,
    ):
        super().__init__(config)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}: give another")
        for name, value in (("query_flops", query_flops), ("document_flops", document_flops)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}: give another")
        given = {"pooling": pooling, "max_length": max_length}
        self._given: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        self.settings = replace(SpladeSettings(), **self._given)
        self.scale, self.query_flops, self.document_flops = scale, query_flops, document_flops
        self.gather = gather

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of a text."""
        return min(self.settings.max_length or self.positions, self.positions)

    def weights(self, batch: PackedBatch) -> Tensor:
        """The weights of a batch's texts, (batch, vocabulary), at least 0."""
        encoded, decoder = self.encode(batch)
        hidden = self.head.transform(encoded.last_hidden_state)
        layer = hidden, decoder, self.head.bias, batch.cu_seqlens
        if self.settings.pooling == "sum":
            return linear_segment_log_sum(*layer, activation=self.settings.activation)
        # The logarithm does not change which token has the maximum.
        weights = linear_segment_max(*layer)[0].relu().log1p()
        return weights.log1p() if self.settings.activation == "log1p_relu" else weights

    def forward(  # type: ignore[override]
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        text_ids: Tensor | None = None,
        flops_share: Tensor | None = None,
        groups: tuple[tuple[int, int, int], ...] | None = None,
    ) -> ModelOutput:
        """The weights of texts; with labels also the loss, the ranking loss of dot products and the regularisers.

        Args:
            batch: the texts, those of one example after those of the other.
            labels: int64 (examples,) of any value.
            text_ids: int64 (examples, 2 or 3), equal numbers for equal texts: a text, its partner and optionally a hard
                negative. None: single texts.
            flops_share: scalar, the share of the regularisers' weights that counts, in a warm-up; None: 1.
            groups: see :func:`fastenc.nn.token_groups.in_groups`. None: all texts at once.
        Returns: the weights as logits, (examples, texts of an example, vocabulary), or (batch, vocabulary) without
            text_ids; with labels also the loss in float32.
        """
        weights = in_groups(self.weights, batch, groups)
        if text_ids is None:
            if labels is not None:
                raise ValueError(
                    "the loss needs text_ids (examples, texts per example), got None: give them with labels"
                )
            return ModelOutput(logits=weights)
        weights = weights.unflatten(0, tuple(text_ids.shape))
        if labels is None:
            return ModelOutput(logits=weights)
        of_all = weights
        if self.gather and self.training:  # a single process evaluates, while the others wait
            of_all, text_ids = rows_of_all(weights), rows_of_all(text_ids)
        loss = ranking_loss(of_all, text_ids, scale=self.scale, own=len(weights), normalize=False)
        share = 1.0 if flops_share is None else flops_share
        for factor, part in (
            (self.query_flops, of_all[:, 0]),
            (self.document_flops, of_all[:, 1:].flatten(0, 1)),
        ):
            if factor:
                loss = loss + share * factor * flops_loss(part)
        return ModelOutput(loss, weights.clone())  # FSDP warns of an output that is a view

    @torch.inference_mode()
    def encode_sparse(
        self,
        texts: str | Sequence[str],
        *,
        batch_size: int = 32,
        max_active: int | None = None,
        convert_to_tensor: bool = False,
        show_progress: bool | None = None,
    ) -> Any:
        """The weights of texts that are not 0, without dropout in either mode of the model.

        While the model computes, a thread tokenises the next texts.

        Args:
            texts: one text or several; a longer one is cut to ``max_tokens``.
            batch_size: texts in a batch. Batches have texts of similar length.
            max_active: the number of each text's heaviest tokens that are kept; None: all.
            convert_to_tensor: return a sparse tensor instead of dictionaries.
            show_progress: show a progress bar on stderr. None: on a terminal, if there are more than ten batches.
        Returns: a list of {token: weight}, from the heaviest to the lightest, or one of them for one text; or a sparse
            COO tensor on the CPU, (texts, vocabulary), for one text (vocabulary,), in the model's dtype.
        Raises: ValueError for a model without a tokenizer, an item that is not a text, and a batch_size or max_active
            below 1.
        """
        tokenizer, listed = self.own_tokenizer(), checked_texts(texts)
        if max_active is not None and max_active < 1:
            raise ValueError(f"max_active must be at least 1, got {max_active}")
        text_batches = TextBatches(tokenizer, self.max_tokens, batch_size)
        number = text_batches.number(len(listed))
        show_progress = unless_few(show_progress, number)
        device = next(self.parameters()).device
        rows: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(listed)
        with without_dropout(), self.encoder.frozen.during_call(self.encoder, calls=number):
            batches = text_batches.of(listed)
            for chosen, batch in progress_bar(
                batches, "encode", "batch", show_progress, total=number
            ):
                weights = self.weights(batch.to(device)).cpu()
                for index, row in zip(chosen, weights, strict=True):
                    tokens = row.nonzero().flatten()
                    order = row[tokens].argsort(descending=True, stable=True)[:max_active]
                    rows[index] = tokens[order], row[tokens[order]]
        single = isinstance(texts, str)
        if convert_to_tensor:
            stacked = _stacked(rows, self.config.vocab_size, next(self.parameters()).dtype)
            return stacked[0] if single else stacked
        named = [
            {
                tokenizer.id_to_token(token) or str(token): weight
                for token, weight in zip(tokens.tolist(), weights.tolist(), strict=True)
            }
            for tokens, weights in rows
        ]
        return named[0] if single else named

    @classmethod
    def stored_in(cls, folder: Path, hf_config: JsonObject) -> bool:
        return is_splade(folder)

    def read_beside(self, folder: Path) -> None:
        self.settings = replace(read_splade(folder) or SpladeSettings(), **self._given)
        self.tokenizer = lowercased(self.tokenizer, folder)

    def write_beside(self, folder: Path) -> None:
        write_splade(folder, self.settings, self.config.vocab_size, self.positions)


def _stacked(rows: list[tuple[Tensor, Tensor]], vocabulary: int, dtype: torch.dtype) -> Tensor:
    counts = torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.long)
    row = torch.arange(len(rows)).repeat_interleave(counts)
    tokens = torch.cat([torch.empty(0), *(tokens for tokens, _ in rows)]).long()
    values = torch.cat([torch.empty(0), *(weights for _, weights in rows)]).to(dtype)
    size = (len(rows), vocabulary)
    indices = torch.stack([row, tokens])
    # As a context and not as an argument, with which torch 2.11 warns that coalesce() is unchecked.
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, values, size).coalesce()
