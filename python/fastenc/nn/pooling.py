"""One vector per sequence from packed token vectors."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base import debug
from fastenc.ops import dispatch, rms_norm, segment_pool
from fastenc.ops.gemm import linear_in_one_order
from fastenc.ops.segment_pool import MODES

LAST_LAYERS = 4
SMALLEST_SQUARE = 1e-24  # keeps a row of zeros from a division by 0
OF_ONE_LAYER = (*MODES, "last-token")
POOLINGS = (*OF_ONE_LAYER, "last-four")


def pool(hidden: Tensor, cu_seqlens: Tensor, pooling: str) -> Tensor:
    """First token, last token, mean or maximum of each sequence's tokens (:func:`fastenc.ops.segment_pool`).

    Args:
        hidden: (total_tokens, hidden_size).
        cu_seqlens: int32 (batch+1,), offsets of the sequences, none of them empty.
        pooling: "cls" (the first token), "last-token", "mean" or "max".
    Returns: (batch, hidden_size), hidden's dtype.
    Raises: ValueError for another pooling, and on CPU tensors for an empty sequence.
    """
    if pooling not in OF_ONE_LAYER:
        raise ValueError(f"pooling must be one of {OF_ONE_LAYER}, got {pooling!r}")
    check_not_empty(cu_seqlens)
    if pooling == "last-token":
        return hidden.index_select(0, cu_seqlens[1:] - 1)
    return segment_pool(hidden, cu_seqlens, pooling)


def check_not_empty(cu_seqlens: Tensor) -> None:
    """Raise ValueError for an empty sequence, where the offsets can be read without waiting for a GPU."""
    if debug.may_read(cu_seqlens):
        bounds = pairwise(cu_seqlens.tolist())
        empty = next((index for index, (begin, end) in enumerate(bounds) if begin == end), None)
        if empty is not None:
            raise ValueError(
                f"an empty sequence has nothing to pool, got one at index {empty}: leave it out of the batch"
            )


def project(vectors: Tensor, projection: nn.Linear) -> Tensor:
    """W x + b of vectors x (batch, in_features). On a CPU threads share the columns of one vector's product."""
    return linear_in_one_order(vectors, projection.weight, projection.bias)


def pool_layers(states: Sequence[Any], cu_seqlens: Tensor, pooling: str) -> Tensor:
    """:func:`pool` of the last layer's state, or with "last-four" the mean over tokens and the last four layers.

    Args:
        states: the embeddings' output and the output of every layer, each (total_tokens, hidden_size). "last-four"
            reads the last four; for other poolings a list of the last state is enough.
        pooling: "cls", "last-token", "mean", "max" or "last-four".
    Returns: (batch, hidden_size), the states' dtype.
    Raises: ValueError for another pooling, an empty sequence, or "last-four" with fewer than four layers.
    """
    check_pooling(pooling, len(states) - 1)
    if pooling != "last-four":
        return pool(states[-1], cu_seqlens, pooling)
    # The mean of the layers' means, so that only one vector per sequence and layer is added.
    means = [pool(state, cu_seqlens, "mean") for state in states[-LAST_LAYERS:]]
    return torch.stack(means).mean(0)


def normalize_rows(x: Tensor) -> Tensor:
    """x (rows, width) with each row scaled to Euclidean length 1; a row of zeros stays.

    On a GPU, PyTorch's sums of a row's squares depend on the number of rows. So a batch-invariant call takes RMSNorm's.
    """
    if not dispatch.is_batch_invariant(x.device.type):
        return F.normalize(x, dim=1)
    width = x.shape[1]
    weight = torch.full((width,), width**-0.5, device=x.device)
    return rms_norm(x, weight, eps=SMALLEST_SQUARE)


def check_pooling(pooling: str, num_layers: int) -> None:
    """Raise ValueError for an unknown pooling, or "last-four" with fewer than four layers."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {POOLINGS}, got {pooling!r}")
    if pooling == "last-four" and num_layers < LAST_LAYERS:
        raise ValueError(
            f"pooling last-four needs {LAST_LAYERS} layers, the model has {num_layers}: take mean"
        )
