"""The embeddings of packed tokens: a sum of table rows, a norm, dropout, and an optional projection."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastenc.nn.evaluation_mode import trains
from fastenc.nn.layer import normalise
from fastenc.nn.layer_norm import LayerNorm, RMSNorm
from fastenc.nn.layer_spec import NormSpec
from fastenc.ops import tied_embedding_layer_norm
from fastenc.packing import PackedBatch


class Embeddings(nn.Module):
    """Norm(scale * word + position + token type), then dropout, then an optional linear projection.

    Args:
        width: width of the tables.
        hidden_size: width of the result; without a projection it is that of the tables.
        positions: rows of the position table; 0: no table.
        position_offset: row of the position table that a sequence's first token takes.
        token_types: rows of the token-type table; 0: no table. With 0 or 1 rows, a batch's token types are ignored.
        norm: the norm's description, or None without a norm.
        norm_bias: whether the norm has a bias.
        scale: factor of the word embeddings.
        projection: whether a linear layer follows.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        hidden_size: int,
        *,
        positions: int,
        position_offset: int = 0,
        token_types: int = 0,
        norm: NormSpec | None,
        norm_bias: bool = True,
        scale: float = 1.0,
        dropout_p: float = 0.0,
        projection: bool = False,
    ):
        super().__init__()
        self.position_offset, self.scale, self.dropout_p = position_offset, scale, dropout_p
        self.word = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(positions, width) if positions else None
        self.token_type = nn.Embedding(token_types, width) if token_types else None
        self.norm_spec = norm
        self.norm = None if norm is None else make_norm(norm, width, norm_bias)
        self.projection = nn.Linear(width, hidden_size) if projection else None

    def forward(
        self, batch: PackedBatch, tied_weight: bool = False, first_position: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Embed the batch's tokens.

        Args:
            tied_weight: also return the word embeddings' weight for a tied decoder
                (:func:`fastenc.ops.tied_embedding_layer_norm`).
            first_position: added to the position ids.
        Returns: (total_tokens, hidden_size); and (vocab_size, width), or None without ``tied_weight``.
        Raises: ValueError for token ids outside the table.
        """
        types = batch.token_type_ids
        type_table = None if self.token_type is None else self.token_type.weight
        if self.token_type is None or self.token_type.num_embeddings == 1:
            types = None
        dropout_p = self.dropout_p if trains(self) else 0.0
        if self._is_one_op():
            assert isinstance(self.norm, LayerNorm)
            x, table = tied_embedding_layer_norm(
                batch.input_ids,
                self.word.weight,
                self.norm.weight,
                self.norm.bias,
                position_ids=None if self.position is None else batch.position_ids,
                position=None if self.position is None else self.position.weight,
                token_type_ids=types,
                token_type=type_table,
                position_offset=self.position_offset + first_position,
                dropout_p=dropout_p,
                eps=self.norm.eps,
            )
        else:
            x, table = self._in_single_ops(batch, types, first_position), self.word.weight
            x = F.dropout(x, dropout_p)
        if self.projection is not None:
            x = self.projection(x)
        return x, table if tied_weight else None

    def normalised(self, rows: Tensor) -> Tensor:
        """Word vectors (rows, width) as the first layer gets them: scaled, normalised, projected; without dropout.

        No position or token type is added. Returns: (rows, hidden_size).
        """
        x = rows * self.scale
        if self.norm is not None and self.norm_spec is not None:
            x = normalise(x, self.norm.weight, getattr(self.norm, "bias", None), self.norm_spec)
        return x if self.projection is None else self.projection(x)

    def _is_one_op(self) -> bool:
        plain = self.norm_spec is not None and self.norm_spec.kind == "layer"
        return plain and self.scale == 1.0

    def _in_single_ops(
        self, batch: PackedBatch, types: Tensor | None, first_position: int
    ) -> Tensor:
        check_ids(batch.input_ids, self.word.num_embeddings)
        x = F.embedding(batch.input_ids, self.word.weight) * self.scale
        if self.position is not None:
            rows = batch.position_ids + (self.position_offset + first_position)
            x = x + F.embedding(rows, self.position.weight)
        if self.token_type is not None:
            rows = torch.zeros_like(batch.input_ids) if types is None else types
            x = x + F.embedding(rows, self.token_type.weight)
        if self.norm is None or self.norm_spec is None:
            return x
        return normalise(x, self.norm.weight, getattr(self.norm, "bias", None), self.norm_spec)


def make_norm(spec: NormSpec, width: int, bias: bool) -> LayerNorm | RMSNorm:
    if spec.kind == "rms":
        return RMSNorm(width, eps=spec.eps)
    return LayerNorm(width, eps=spec.eps, bias=bias)


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError for ids outside the table; on CPU tensors only, because a GPU would have to wait."""
    is_checked = input_ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if not is_checked or not input_ids.numel():
        return
    low, high = (int(value) for value in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {vocab_size}), got {low if low < 0 else high}: "
            "do tokenizer and model belong together?"
        )
