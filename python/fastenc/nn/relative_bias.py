"""Learned biases of attention scores that depend on the distance between key and query, grouped in buckets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MOST_DISTANCES = 4096  # on each side, unless a sequence is longer


@dataclass(frozen=True)
class RelativeBiasSpec:
    """The buckets of a table (num_buckets, num_heads) of biases.

    One half of the buckets is for keys at or before the query, the other half for keys after it. In each half, the
    first half of the buckets have one distance each. The others have ranges that grow logarithmically up to
    ``max_distance``. All larger distances share the last bucket. If ``bidirectional`` is False, all buckets are for
    keys at or before the query, and keys after it, which a decoder does not see, have bucket 0.
    Source: Raffel et al. 2020, arXiv:1910.10683.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True


def distance_buckets(spec: RelativeBiasSpec, reach: int, device: torch.device | str) -> Tensor:
    """int64 (2 reach + 1,): the buckets of the distances key - query, -reach to reach."""
    compute = _compute_buckets if torch.compiler.is_compiling() else _cached_buckets
    return compute(spec, reach, torch.device(device))


def _compute_buckets(spec: RelativeBiasSpec, reach: int, device: torch.device) -> Tensor:
    half = spec.num_buckets // 2 if spec.bidirectional else spec.num_buckets
    exact = half // 2
    with torch.inference_mode(False):
        distance = torch.arange(-reach, reach + 1)
        size = distance.abs() if spec.bidirectional else (-distance).clamp(min=0)
        ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
        grown = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(size < exact, size, grown)
        return (bucket + (distance > 0) * (half if spec.bidirectional else 0)).to(device)


# Never dropped, because a CUDA graph may read the tensor again.
_cached_buckets = cache(_compute_buckets)


def layer_biases(
    tables: Sequence[Tensor], spec: RelativeBiasSpec | None, max_seqlen: int
) -> Callable[[int], Tensor | None]:
    """A function from a layer's number to its bias (:func:`relative_bias`), or to None if ``spec`` is None.

    Args:
        tables: one table for all layers, or one for each layer.
        max_seqlen: length of the longest sequence.
    """
    if spec is None:
        return lambda number: None
    biases = [relative_bias(table, spec, max_seqlen) for table in tables]
    return lambda number: biases[number if len(biases) > 1 else 0]


def relative_bias(table: Tensor, spec: RelativeBiasSpec, max_seqlen: int) -> Tensor:
    """(num_heads, 2 reach + 1), as :func:`fastenc.ops.attention` takes it; differentiable.

    The reach is ``max_distance``, or a smaller power of two that no distance of the batch exceeds.
    """
    reach = spec.max_distance
    if reach > MOST_DISTANCES:  # bit_length() makes max_seqlen a constant of torch.compile's graph
        reach = min(reach, max(MOST_DISTANCES, 1 << max_seqlen.bit_length()))
    buckets = distance_buckets(spec, reach, table.device)
    return table[buckets].t()
