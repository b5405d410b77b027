"""Rotary positions: the table of angles that :func:`fastenc.ops.rotary` and attention take."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """f_i = theta^(-2i/dim) / factor. Source: Chen et al. 2023, arXiv:2306.15595."""

    factor: float

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        return plain_frequencies(dim, theta) / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """f_i = theta^(-2i/dim) ((1 - r_i) + r_i / factor): frequencies with many periods in a text of pretraining stay.

    Fields:
        factor: by which frequencies with few periods are divided.
        positions: the length of a text of pretraining.
        fast, slow: periods in that length at which the ramp r begins (r = 0) and ends (r = 1).
        truncate: begin and end the ramp at whole pairs of columns.
        amplitude: factor of the cosines and sines.
    Source: Peng et al. 2023, arXiv:2309.00071.
    """

    factor: float
    positions: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        begin, end = (self._pair(periods, dim, theta) for periods in (self.fast, self.slow))
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        if begin == end:
            end += 0.001  # so that the ramp has a width
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
        stays = 1 - ramp
        powers = _powers(dim, theta)
        return 1.0 / (self.factor * powers) * (1 - stays) + 1.0 / powers * stays

    def _pair(self, periods: float, dim: int, theta: float) -> float:
        """The (fractional) pair of columns whose angle has this number of periods in a text of pretraining length."""
        ratio = self.positions / (periods * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))


@dataclass(frozen=True)
class RotarySpec:
    """Angle i of position p is p f_i, f_i = theta^(-2i/dim) where nothing scales it, for i < dim/2.

    Fields:
        dim: columns of a head that are rotated.
        theta: base of the frequencies.
        scaling: of the frequencies, for longer texts than those of pretraining.
        bounded: whether texts longer than the model's positions have other angles, which depend on the batch.
    Source: Su et al. 2021, arXiv:2104.09864.
    """

    dim: int
    theta: float
    scaling: LinearScaling | YarnScaling | None = None
    bounded: bool = False


def rotary_table(spec: RotarySpec, positions: int, device: torch.device | str) -> Tensor:
    """float32 (positions, dim): the cosines of the dim / 2 angles of each position, then their sines.

    The angles are formed as transformers forms them: float32 frequencies times float32 positions.
    """
    device = torch.device(device)
    if torch.compiler.is_compiling():  # whose graphs cannot see into a cache
        return _form(spec, positions, device)
    return _kept(spec, 1 << max(0, positions - 1).bit_length(), device)[:positions]


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """float32 (dim / 2,): theta^(-2i/dim)."""
    return 1.0 / _powers(dim, theta)


def _powers(dim: int, theta: float) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)


@cache  # Never dropped: a CUDA graph may go on reading a table. Powers of two keep them few.
def _kept(spec: RotarySpec, positions: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _form(spec, positions, device)


def _form(spec: RotarySpec, positions: int, device: torch.device) -> Tensor:
    scaling = spec.scaling
    frequencies = (
        plain_frequencies(spec.dim, spec.theta)
        if scaling is None
        else scaling.frequencies(spec.dim, spec.theta)
    )
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    return (table if scaling is None else table * scaling.amplitude).to(device)
