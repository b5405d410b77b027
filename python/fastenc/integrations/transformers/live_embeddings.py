"""The embeddings of a live model for the real tokens of a padded batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.integrations.transformers.live_encoder import LiveEncoder, Reading
from fastenc.nn.layer import normalise
from fastenc.ops import tied_embedding_layer_norm
from fastenc.packing import PackedBatch


def embed(
    live: LiveEncoder, reading: Reading, arguments: dict[str, Any], batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    """The embedded tokens (total_tokens, hidden_size), and the word embeddings' weight for a tied decoder."""
    assert batch.padded_shape is not None and batch.indices is not None  # pack() sets them
    shape, indices = batch.padded_shape, batch.indices
    take = lambda padded: padded.expand(*shape, *padded.shape[2:]).flatten(0, 1)[indices]
    module: Callable[[str], Any] = lambda name: reading.modules.get(f"embeddings.{name}")
    word, position, token_type, norm = map(module, ("word", "position", "token_type", "norm"))
    positions = types = None
    if position is not None:
        given = arguments.get("position_ids")
        positions = take(
            _positions(live, arguments, shape, indices.device) if given is None else given
        )
    if token_type is not None and arguments.get("token_type_ids") is not None:
        types = take(arguments["token_type_ids"])
    inputs_embeds = arguments.get("inputs_embeds")
    spec, scale = live.kind.embedding_norm(live.config), live.kind.embedding_scale(live.config)
    tables = [table.weight for table in (word, position, token_type) if table is not None]
    one_dtype = all(table.dtype == word.weight.dtype for table in tables)
    one_op = inputs_embeds is None and scale == 1.0 and one_dtype
    if one_op and spec is not None and spec.kind == "layer":
        x, tied_weight = tied_embedding_layer_norm(
            batch.input_ids,
            word.weight,
            norm.weight,
            norm.bias,
            position_ids=positions,
            position=None if position is None else position.weight,
            token_type_ids=types,
            token_type=None if token_type is None else token_type.weight,
            padding_idx=word.padding_idx,
            position_padding_idx=None if position is None else position.padding_idx,
            dropout_p=reading.embedding_dropout_p,
            eps=spec.eps,
        )
    else:
        tied_weight = word.weight
        # The weights are used and not the modules, because BART's modules scale and shift.
        look_up = lambda table, rows: F.embedding(rows, table.weight, table.padding_idx)
        ids = batch.input_ids
        x = look_up(word, ids) * scale if inputs_embeds is None else take(inputs_embeds)
        if token_type is not None:
            x = x + look_up(token_type, torch.zeros_like(ids) if types is None else types)
        if position is not None:
            x = x + look_up(position, positions)
        if spec is not None:
            x = normalise(x, norm.weight, getattr(norm, "bias", None), spec)
        x = F.dropout(x, reading.embedding_dropout_p)
    projection = module("projection")
    return (x if projection is None else projection(x)), tied_weight


def _positions(
    live: LiveEncoder, arguments: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> Tensor:
    """The rows of the position table for the padded batch, as the architecture counts them."""
    length = shape[1]
    if not live.kind.positions_after_padding:
        return torch.arange(length, device=device)[None] + live.config.position_offset
    padding = live.kind.padding_row(live.config.pad_token_id)
    ids = arguments.get("input_ids")
    if ids is None:
        return torch.arange(length, device=device)[None] + padding + 1
    real = ids.ne(padding).long()
    return real.cumsum(1) * real + padding
