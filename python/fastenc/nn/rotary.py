"""Rotary positions: the table of angles that :func:`fastenc.ops.rotary` and attention take."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotarySpec:
    """Angles of position p: p / (theta * ntk)^(2 i / dim) for pair i of ``dim`` columns, divided by ``factor``.

    Fields:
        dim: columns of a head that are rotated.
        theta: base of the frequencies.
        factor: of linear scaling; positions are divided by it.
    Source: Su et al. 2021, arXiv:2104.09864.
    """

    dim: int
    theta: float
    factor: float = 1.0


def rotary_table(spec: RotarySpec, positions: int, device: torch.device | str) -> Tensor:
    """float32 (positions, dim): the cosines of the dim / 2 angles of each position, then their sines.

    The angles are formed as transformers forms them: float32 frequencies times float32 positions.
    """
    return _table(spec, positions, torch.device(device))


@lru_cache(maxsize=16)
def _table(spec: RotarySpec, positions: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        pairs = torch.arange(0, spec.dim, 2, dtype=torch.int64).to(torch.float32)
        frequencies = 1.0 / (spec.theta ** (pairs / spec.dim)) / spec.factor
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        return torch.cat([angles.cos(), angles.sin()], 1).to(device)
