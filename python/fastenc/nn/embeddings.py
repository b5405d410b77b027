"""The embeddings of packed tokens: a sum of table rows, a norm, dropout, and an optional projection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastenc._base import debug
from fastenc.nn.embedding_table import EmbeddingTable, FixedEmbeddingTable
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.layer import normalise
from fastenc.nn.layer_norm import LayerNorm, OffsetRMSNorm, RMSNorm
from fastenc.nn.layer_spec import NormSpec
from fastenc.ops import tied_embedding_layer_norm
from fastenc.ops.embedding import embedding
from fastenc.ops.gemm import linear_in_one_order
from fastenc.packing import PackedBatch

# Table → a function of ids that returns what an adaptation adds to its rows.
AddedRows = Mapping[str, Callable[[Tensor], Tensor]]
MASKED_SHARE = 0.15 * 0.8  # of the tokens in ESM's pretraining


@dataclass(frozen=True)
class EmbeddingSpec:
    """Embeddings: the norm after the sum of the tables' rows, or None, and the factor of the word embeddings.

    Fields:
        project_first: the projection comes before norm and dropout, not after them.
        drop_first: dropout comes before the norm, not after it.
        masked: the id of a token whose word vector is 0; in a sequence where its share is m, the other word vectors
            are multiplied by (1 - 0.12) / (1 - m), or None. 0.12 is its share in pretraining.
            Source: ESM's "token dropout", Rives et al. 2021, doi:10.1073/pnas.2016239118.
    """

    norm: NormSpec | None
    scale: float = 1.0
    project_first: bool = False
    drop_first: bool = False
    masked: int | None = None


class EmbeddingTables(NamedTuple):
    """The tables (rows, width), the norm's parameters (width,), and the projection, each None if there is none.

    ``token_type`` has the row of the task added, where a family has one (:func:`with_task_type`).
    ``padding_idx``, ``position_padding_idx``: the rows of the word and position tables that get no gradient, or None.
    """

    word: Tensor
    position: Tensor | None
    token_type: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    projection: Callable[[Tensor], Tensor] | None
    padding_idx: int | None = None
    position_padding_idx: int | None = None


class Embeddings(nn.Module):
    """Norm(scale * word + position + token type + task type 0), then dropout, then an optional linear projection.

    Args:
        width: width of the tables.
        hidden_size: width of the result; without a projection it is that of the tables.
        padding_idx: the row of the word table that gets no gradient, or None.
        positions: rows of the position table; 0: no table.
        fixed_positions: its values (positions, width), if it is not trained.
        position_offset: row of the position table that a sequence's first token takes.
        token_types: rows of the token-type table; 0: no table. With 0 or 1 rows, a batch's token types are ignored.
        task_types: rows of the task-type table, of which every token has row 0; 0: no table.
        norm: the norm's description, or None without a norm.
        norm_bias: whether the norm has a bias.
        scale: factor of the word embeddings.
        masked: see :class:`EmbeddingSpec`.
        projection: whether a linear layer follows.
        project_first: whether it comes before the norm, and has no bias.
        drop_first: whether dropout comes before the norm.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        positions: int,
        fixed_positions: Tensor | None = None,
        position_offset: int = 0,
        token_types: int = 0,
        task_types: int = 0,
        norm: NormSpec | None,
        norm_bias: bool = True,
        scale: float = 1.0,
        masked: int | None = None,
        dropout_p: float = 0.0,
        projection: bool = False,
        project_first: bool = False,
        drop_first: bool = False,
    ):
        super().__init__()
        self.position_offset, self.dropout_p = position_offset, dropout_p
        self.padding_idx = padding_idx
        self.spec = EmbeddingSpec(norm, scale, project_first and projection, drop_first, masked)
        self.word = EmbeddingTable(vocab_size, width)
        self.position: EmbeddingTable | FixedEmbeddingTable | None = None
        if fixed_positions is not None:
            self.position = FixedEmbeddingTable(fixed_positions)
        elif positions:
            self.position = EmbeddingTable(positions, width)
        self.token_type = EmbeddingTable(token_types, width) if token_types else None
        self.task_type = EmbeddingTable(task_types, width) if task_types else None
        norm_width = hidden_size if self.spec.project_first else width
        self.norm = None if norm is None else make_norm(norm, norm_width, norm_bias)
        self.projection = (
            nn.Linear(width, hidden_size, bias=not project_first) if projection else None
        )

    def forward(
        self,
        batch: PackedBatch,
        tied_weight: bool = False,
        first_position: int = 0,
        added: AddedRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Embed the batch's tokens.

        Args:
            tied_weight: also return the word embeddings' weight for a tied decoder
                (:func:`fastenc.ops.tied_embedding_layer_norm`).
            first_position: added to the position ids.
            added: see :func:`embed`.
        Returns: (total_tokens, hidden_size); and (vocab_size, width), or None without ``tied_weight``.
        Raises: ValueError for token ids outside the table.
        """
        types = batch.token_type_ids
        if self.token_type is None or self.token_type.num_embeddings == 1:
            types = None
        x, table = embed(
            self.spec,
            self._tables(),
            batch.input_ids,
            position_ids=None if self.position is None else batch.position_ids,
            position_offset=self.position_offset + first_position,
            token_type_ids=types,
            cu_seqlens=batch.cu_seqlens,
            dropout_p=self.dropout_p if trains(self) else 0.0,
            added=added,
        )
        return x, table if tied_weight else None

    def normalised(self, rows: Tensor) -> Tensor:
        """Word vectors (rows, width) as the first layer gets them: scaled, normalised, projected; without dropout.

        No position or token type is added. Returns: (rows, hidden_size).
        """
        return normalised_words(self.spec, self._tables(), rows)

    def _tables(self) -> EmbeddingTables:
        return EmbeddingTables(
            self.word.weight,
            None if self.position is None else self.position.weight,
            with_task_type(self.token_type, self.task_type),
            None if self.norm is None else self.norm.weight,
            getattr(self.norm, "bias", None),
            self.projection,
            self.padding_idx,
        )


def with_task_type(token_type: Any, task_type: Any) -> Tensor | None:
    """The weight of a token-type table plus row 0 of a task-type table; each may be None."""
    if task_type is None:
        return None if token_type is None else token_type.weight
    return task_type.weight[:1] if token_type is None else token_type.weight + task_type.weight[0]


def embed(
    spec: EmbeddingSpec,
    tables: EmbeddingTables,
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    position_offset: int = 0,
    token_type_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    masked_counts: Tensor | None = None,
    dropout_p: float = 0.0,
    added: AddedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm(scale * word + position + token type), then dropout, then the projection.

    Args:
        input_ids, position_ids, token_type_ids: int64 (total_tokens,). Without token types, every token has type 0.
        position_offset: added to position_ids.
        inputs_embeds: (total_tokens, width), taken in place of the words' vectors, without the scale.
        cu_seqlens: int32 (batch+1,), offsets of the sequences, which ``spec.masked`` needs.
        masked_counts: int64 (batch,), the number of ``spec.masked`` in each sequence; None: as in input_ids.
        added: table ("word" or "token_type") → a function of ids that returns what is added to its rows.
    Returns: (total_tokens, hidden_size), and the word embeddings' weight for a tied decoder
        (:func:`fastenc.ops.tied_embedding_layer_norm`).
    Raises: ValueError for token ids outside the table.
    """
    t, norm = tables, spec.norm
    used = [table for table in (t.word, t.position, t.token_type) if table is not None]
    one_dtype = all(table.dtype == t.word.dtype for table in used)
    plain_words = spec.scale == 1.0 and spec.masked is None and inputs_embeds is None
    one_op = one_dtype and plain_words and not spec.project_first and not added
    one_op = one_op and not (spec.drop_first and dropout_p > 0)
    if one_op and norm is not None and norm.norm_type == "layer" and t.norm_weight is not None:
        x, tied_weight = tied_embedding_layer_norm(
            input_ids,
            t.word,
            t.norm_weight,
            t.norm_bias,
            position_ids=position_ids,
            position=t.position,
            token_type_ids=token_type_ids,
            token_type=t.token_type,
            position_offset=position_offset,
            padding_idx=t.padding_idx,
            position_padding_idx=t.position_padding_idx,
            dropout_p=dropout_p,
            eps=norm.eps,
        )
    else:
        tied_weight = t.word
        added = added or {}
        x = (
            _words(spec, t, input_ids, cu_seqlens, masked_counts, added.get("word"))
            if inputs_embeds is None
            else inputs_embeds
        )
        # In transformers' order, so that sums are rounded alike.
        if t.token_type is not None:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + F.embedding(types, t.token_type)
            x = x + added["token_type"](types) if "token_type" in added else x
        if t.position is not None and position_ids is not None:
            rows = position_ids + position_offset
            x = x + F.embedding(rows, t.position, t.position_padding_idx)
        if spec.project_first:
            x = _projected(t, x)
        if spec.drop_first:
            x = _normalised(spec, t, F.dropout(x, dropout_p))
        else:
            x = F.dropout(_normalised(spec, t, x), dropout_p)
    return (x if spec.project_first else _projected(t, x)), tied_weight


def _projected(tables: EmbeddingTables, x: Tensor) -> Tensor:
    projection = tables.projection
    if type(projection) is nn.Linear:  # not a module of PEFT around one
        return linear_in_one_order(x, projection.weight, projection.bias)
    return x if projection is None else projection(x)


def normalised_words(spec: EmbeddingSpec, tables: EmbeddingTables, rows: Tensor) -> Tensor:
    """Word vectors (rows, width), scaled, normalised and projected: (rows, hidden_size), without dropout."""
    x = rows * (spec.scale if spec.masked is None else spec.scale * (1 - MASKED_SHARE))
    if spec.project_first:
        return _normalised(spec, tables, _projected(tables, x))
    return _projected(tables, _normalised(spec, tables, x))


def _words(
    spec: EmbeddingSpec,
    tables: EmbeddingTables,
    input_ids: Tensor,
    cu_seqlens: Tensor | None,
    masked_counts: Tensor | None,
    added: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    check_ids(input_ids, tables.word.shape[0])
    x = embedding(input_ids, tables.word, tables.padding_idx)
    x = (x if added is None else x + added(input_ids)) * spec.scale
    if spec.masked is None or cu_seqlens is None:
        return x
    return _scaled_for_masked(x, input_ids == spec.masked, cu_seqlens, masked_counts)


def _scaled_for_masked(
    x: Tensor, is_masked: Tensor, cu_seqlens: Tensor, masked_counts: Tensor | None
) -> Tensor:
    """x (total_tokens, width), 0 for masked tokens and scaled by (1 - MASKED_SHARE) / (1 - share in the sequence)."""
    if masked_counts is None:
        masked_counts = F.pad(is_masked.cumsum(0), (1, 0))[cu_seqlens].diff()
    share = masked_counts.float() / cu_seqlens.diff()
    token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    of_token = share[torch.searchsorted(cu_seqlens[1:], token, right=True)]
    # In transformers' order, so that products are rounded alike.
    scaled = x.masked_fill(is_masked[:, None], 0.0) * (1 - MASKED_SHARE)
    return (scaled / (1 - of_token)[:, None]).to(x.dtype)


def _normalised(spec: EmbeddingSpec, tables: EmbeddingTables, x: Tensor) -> Tensor:
    if spec.norm is None or tables.norm_weight is None:
        return x
    return normalise(x, tables.norm_weight, tables.norm_bias, spec.norm)


def make_norm(spec: NormSpec, width: int, bias: bool) -> LayerNorm | RMSNorm:
    if spec.norm_type == "rms":
        return (OffsetRMSNorm if spec.plus_one else RMSNorm)(width, eps=spec.eps)
    return LayerNorm(width, eps=spec.eps, bias=bias)


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for ids outside the table, where ``debug.may_read`` allows it."""
    if not debug.may_read(input_ids) or not input_ids.numel():
        return
    low, high = (int(value) for value in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {vocab_size}), got {low if low < 0 else high}: "
            "do tokenizer and model belong together?"
        )
