"""The embeddings of a live model for the real tokens of a padded batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastenc.integrations.transformers.live_encoder import LiveEncoder, Reading
from fastenc.nn.embeddings import EmbeddingTables
from fastenc.nn.embeddings import embed as embed_tokens
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
    # The weights are used and not the modules, because BART's modules scale and shift.
    tables = EmbeddingTables(
        word.weight,
        None if position is None else position.weight,
        None if token_type is None else token_type.weight,
        None if norm is None else norm.weight,
        getattr(norm, "bias", None),
        module("projection"),
        word.padding_idx,
        None if position is None else position.padding_idx,
    )
    inputs_embeds = arguments.get("inputs_embeds")
    return embed_tokens(
        live.embeddings,
        tables,
        batch.input_ids,
        position_ids=positions,
        token_type_ids=types,
        inputs_embeds=None if inputs_embeds is None else take(inputs_embeds),
        dropout_p=reading.embedding_dropout_p,
    )


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
