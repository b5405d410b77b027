"""Learned biases of attention scores by the distance of key and query, in buckets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativeBiasSpec:
    """A table of (num_buckets, num_heads): half of the buckets for keys at or before the query, half for those after.

    Of each half, the first half of the buckets stand for one distance each, the others for ranges that grow
    logarithmically up to ``max_distance``, beyond which all distances share the last.
    Source: Raffel et al. 2020, arXiv:1910.10683.
    """

    num_buckets: int = 32
    max_distance: int = 128


def distance_buckets(spec: RelativeBiasSpec, device: torch.device | str) -> Tensor:
    """int64 (2 max_distance + 1,): the buckets of distances key - query from -max_distance to max_distance."""
    form = _form_buckets if torch.compiler.is_compiling() else _buckets
    return form(spec, torch.device(device))


def _form_buckets(spec: RelativeBiasSpec, device: torch.device) -> Tensor:
    half = spec.num_buckets // 2
    exact = half // 2
    with torch.inference_mode(False):
        distance = torch.arange(-spec.max_distance, spec.max_distance + 1)
        size = distance.abs()
        ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
        grown = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(size < exact, size, grown)
        return (bucket + (distance > 0) * half).to(device)


# Copied to a device once, and never dropped: a CUDA graph may go on reading it.
_buckets = cache(_form_buckets)


def layer_biases(
    tables: Sequence[Tensor], spec: RelativeBiasSpec | None
) -> Callable[[int], Tensor | None]:
    """Number of a layer → its bias: from the shared table or the layer's, or None without tables."""
    if spec is None:
        return lambda number: None
    biases = [relative_bias(table, spec) for table in tables]
    return lambda number: biases[number if len(biases) > 1 else 0]


def relative_bias(table: Tensor, spec: RelativeBiasSpec) -> Tensor:
    """(num_heads, 2 max_distance + 1), as :func:`fastenc.ops.attention` takes it; differentiable."""
    return table[distance_buckets(spec, table.device)].t()
