"""The embeddings of a live model for the real tokens of a padded batch."""

from typing import Any

import torch
from torch import Tensor

from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.nn.embeddings import EmbeddingTables, with_task_type
from fastenc.nn.embeddings import embed as embed_tokens
from fastenc.packing import PackedBatch


def embed(
    live: LiveEncoder,
    reading: Reading,
    arguments: dict[str, Tensor | None],
    batch: PackedBatch,
    earlier: int = 0,
) -> tuple[Tensor, Tensor]:
    """The embedded tokens (total_tokens, hidden_size), and the word embeddings' weight for a tied decoder.

    Args: earlier: how many tokens of each sequence were before these.
    """
    assert batch.padded_shape is not None and batch.indices is not None  # pack() sets them
    shape, indices = batch.padded_shape, batch.indices
    take = lambda padded: padded.expand(*shape, *padded.shape[2:]).flatten(0, 1)[indices]
    position, token_type = (
        reading.modules.get(f"embeddings.{name}") for name in ("position", "token_type")
    )
    positions = types = None
    if position is not None:
        given = arguments.get("position_ids")
        positions = take(
            _positions(live, arguments, shape, indices.device, earlier) if given is None else given
        )
    if token_type is not None and arguments.get("token_type_ids") is not None:
        types = take(arguments["token_type_ids"])
    masked_counts = None
    if live.embeddings.masked is not None:  # ESM counts the padding's too
        ids = arguments["input_ids"]
        assert ids is not None  # ESM takes no inputs_embeds
        masked_counts = (ids == live.embeddings.masked).sum(1)
    inputs_embeds = arguments.get("inputs_embeds")
    return embed_tokens(
        live.embeddings,
        tables_of(reading),
        batch.input_ids,
        position_ids=positions,
        token_type_ids=types,
        inputs_embeds=None if inputs_embeds is None else take(inputs_embeds),
        cu_seqlens=batch.cu_seqlens,
        masked_counts=masked_counts,
        dropout_p=reading.embedding_dropout_p,
    )


def tables_of(reading: Reading) -> EmbeddingTables:
    """The tables of a live model; its modules are not called, because BART's scale and shift."""
    names = ("word", "position", "token_type", "task_type", "norm", "projection")
    word, position, token_type, task_type, norm, projection = (
        reading.modules.get(f"embeddings.{name}") for name in names
    )
    assert word is not None  # every architecture names it
    return EmbeddingTables(
        word.weight,
        None if position is None else _weight_of(position),
        with_task_type(token_type, task_type),
        None if norm is None else norm.weight,
        getattr(norm, "bias", None),
        projection,
        word.padding_idx,
        None if position is None else position.padding_idx,
    )


def _weight_of(table: Any) -> Tensor:
    """The values of a table. M2M100's module of positions calls them ``weights``."""
    weight: Tensor = table.weights if hasattr(table, "weights") else table.weight
    return weight


def _positions(
    live: LiveEncoder,
    arguments: dict[str, Tensor | None],
    shape: tuple[int, int],
    device: torch.device,
    earlier: int,
) -> Tensor:
    """The rows of the position table for the padded batch, as the architecture counts them."""
    length = shape[1]
    if not live.architecture.positions_after_padding:
        return torch.arange(length, device=device)[None] + earlier + live.config.position_offset
    padding = live.architecture.padding_row(live.config.pad_token_id)
    ids = arguments.get("input_ids")
    if ids is None:
        return torch.arange(length, device=device)[None] + earlier + padding + 1
    real = ids.ne(padding).long()
    return (real.cumsum(1) + earlier) * real + padding
