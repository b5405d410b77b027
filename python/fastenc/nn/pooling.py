"""One vector a sequence from packed token vectors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastenc.ops import segment_pool
from fastenc.ops.segment_pool import MODES

LAST_LAYERS = 4
POOLINGS = (*MODES, "last-four")


def pool(hidden: Tensor, cu_seqlens: Tensor, pooling: str) -> Tensor:
    """CLS, mean or max of each sequence's tokens.

    Args:
        hidden: (total_tokens, hidden_size); cu_seqlens: int32 (batch+1,), no sequence empty.
        pooling: "cls" (the first token), "mean" or "max".
    Returns: (batch, hidden_size), hidden's dtype, as :func:`fastenc.ops.segment_pool` forms it.
    Raises: ValueError for another name or an empty sequence.
    """
    if pooling not in MODES:
        raise ValueError(f"pooling must be one of {MODES}, got {pooling!r}")
    # Values are read only on CPU tensors; on an accelerator that would wait for the device.
    reads = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if reads and bool((cu_seqlens.diff() == 0).any()):
        raise ValueError(
            "an empty sequence has nothing to pool, got one at index "
            f"{int((cu_seqlens.diff() == 0).nonzero()[0])}: leave it out of the batch"
        )
    return segment_pool(hidden, cu_seqlens, pooling)


def pool_layers(states: Sequence[Any], cu_seqlens: Tensor, pooling: str) -> Tensor:
    """:func:`pool` of the last layer, or with "last-four" the mean over tokens and the last four layers.

    Args:
        states: (total_tokens, hidden_size) each, the embeddings' output and every layer's, of which only those that are
            pooled are read; the last layer's alone will do but for "last-four".
    Returns: (batch, hidden_size), the states' dtype.
    Raises: ValueError for another name, an empty sequence, or "last-four" of fewer layers.
    """
    check_pooling(pooling, len(states) - 1)
    if pooling != "last-four":
        return pool(states[-1], cu_seqlens, pooling)
    # The mean of the layers' means: each layer is read once, and only vectors of sequences are added.
    means = [pool(state, cu_seqlens, "mean") for state in states[-LAST_LAYERS:]]
    return torch.stack(means).mean(0)


def check_pooling(pooling: str, num_layers: int) -> None:
    """Raises: ValueError for a name that is none, or "last-four" of fewer than four layers."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {POOLINGS}, got {pooling!r}")
    if pooling == "last-four" and num_layers < LAST_LAYERS:
        raise ValueError(
            f"pooling last-four needs {LAST_LAYERS} layers, the model has {num_layers}: take mean"
        )
