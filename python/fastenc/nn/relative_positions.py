"""Learned embeddings of relative positions, which disentangled attention compares with queries and keys (DeBERTa)."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.nn.layer_inputs import RelativePositions
from fastenc.nn.layer_spec import NormSpec
from fastenc.ops import layer_norm


@dataclass(frozen=True)
class RelativePositionSpec:
    """The rows of a table of relative positions.

    With r = query - key, B = num_buckets, M = max_distance:

        row = clamp(bucket(r) + B, 0, 2 B - 1)
        bucket(r) = r for |r| <= B/2, else sign(r) (B/2 + ceil(ln(|r| / (B/2)) / ln((M - 1) / (B/2)) (B/2 - 1)))

    Without buckets (0), row = clamp(r + M, 0, 2 M - 1).

    Fields:
        norm: the norm of the table's rows, or None.
    Source: He et al. 2020, arXiv:2006.03654; the logarithmic buckets are those of its second version.
    """

    num_buckets: int
    max_distance: int
    norm: NormSpec | None = None

    @property
    def rows(self) -> int:
        return 2 * (self.num_buckets or self.max_distance)


class PositionTable(NamedTuple):
    """The table (rows, hidden_size), and the parameters (hidden_size,) of its norm, None without one."""

    weight: Tensor
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


def position_table(table: Any, norm: Any) -> PositionTable | None:
    """The weights of the table's and the norm's module, either of which may be None."""
    if table is None:
        return None
    if norm is None:
        return PositionTable(table.weight)
    return PositionTable(table.weight, norm.weight, getattr(norm, "bias", None))


def distance_slots(spec: RelativePositionSpec, reach: int) -> Tensor:
    """int32 (2 reach + 1,): the table's rows for the distances key - query from -reach to reach."""
    r = torch.arange(reach, -reach - 1, -1)
    half = spec.num_buckets // 2
    if half:
        # In transformers' order and in float32, because a rounded logarithm decides between two buckets.
        size = r.abs().clamp(min=half)
        farthest = torch.log(torch.tensor((spec.max_distance - 1) / half))
        grown = torch.ceil(torch.log(size / half) / farthest * (half - 1)) + half
        r = torch.where(size <= half, r, (grown * r.sign()).long())
    return (r + spec.rows // 2).clamp(0, spec.rows - 1).int()


def relative_positions(
    table: PositionTable, spec: RelativePositionSpec, max_seqlen: int
) -> RelativePositions:
    """The normalised rows that the distances of a batch may need, and each distance's row among them."""
    weight, device, first = table.weight, table.weight.device, 0
    if torch.compiler.is_compiling():  # in a graph the rows do not depend on the batch
        slots = distance_slots(spec, spec.max_distance).to(device)
    else:
        # Few reaches keep the tables few. On a GPU, where each is copied to the device, they are powers of two.
        near = -(-max_seqlen // 16) * 16
        reach = near if device.type == "cpu" else 1 << max(0, max_seqlen - 1).bit_length()
        first, last, slots = _used_rows(spec, min(spec.max_distance, reach), device)
        weight = weight[first : last + 1]
    return RelativePositions(position_rows(table._replace(weight=weight), spec), slots, first)


def position_rows(table: PositionTable, spec: RelativePositionSpec) -> Tensor:
    """The table's rows after its norm, if it has one."""
    if spec.norm is None or table.norm_weight is None:
        return table.weight
    return layer_norm(table.weight, table.norm_weight, table.norm_bias, eps=spec.norm.eps)


@cache  # Never dropped, because a CUDA graph may read a tensor again.
def _used_rows(
    spec: RelativePositionSpec, reach: int, device: torch.device
) -> tuple[int, int, Tensor]:
    """The first and the last row that distances up to ``reach`` have, and their rows counted from the first."""
    with torch.inference_mode(False):
        slots = distance_slots(spec, reach)
        # Rows fall as the distance grows.
        first, last = int(slots[-1]), int(slots[0])
        return first, last, (slots - first).to(device)
