"""The table of rotary angles that :func:`fastenc.ops.rotary` and :func:`fastenc.ops.attention` take."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MOST_ROWS = 2**17  # of a table, unless a text is longer


@dataclass(frozen=True)
class LinearScaling:
    """Frequencies f_i = theta^(-2i/dim) / factor. Source: Chen et al. 2023, arXiv:2306.15595."""

    factor: float

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        return plain_frequencies(dim, theta) / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies f_i = theta^(-2i/dim) ((1 - r_i) + r_i / factor), where r_i is a ramp from 0 to 1.

    Frequencies with many periods in the pretraining length are kept (r = 0), those with few are divided by ``factor``
    (r = 1).

    Fields:
        positions: the pretraining length in tokens.
        fast, slow: numbers of periods in that length at which the ramp begins (r = 0) and ends (r = 1).
        truncate: round the begin and the end of the ramp to whole indices i.
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
        begin, end = (self._index(periods, dim, theta) for periods in (self.fast, self.slow))
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        if begin == end:
            end += 0.001  # avoids a division by 0
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
        kept = 1 - ramp
        powers = _powers(dim, theta)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _index(self, periods: float, dim: int, theta: float) -> float:
        """The (fractional) index i of the frequency with this number of periods in the pretraining length."""
        ratio = self.positions / (periods * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))


@dataclass(frozen=True)
class StoredFrequencies:
    """The frequencies f_i that a checkpoint has as a tensor, which may be rounded."""

    values: tuple[float, ...]

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> Tensor:
        return torch.tensor(self.values)


@dataclass(frozen=True)
class RotarySpec:
    """Rotary angles: angle i of position p is p f_i, for i < dim/2. Without scaling f_i = theta^(-2i/dim).

    Fields:
        dim: number of columns of a head that are rotated.
        theta: base of the frequencies.
        scaling: how the frequencies differ from these, for texts longer than the pretraining length or in a file; or
            None.
        bounded: whether these angles are valid up to the model's max_positions only. The family then has no angles for
            longer texts, or angles that depend on the longest text of a batch.
        exact: the angles are computed in float64, not in float32.
    Source: Su et al. 2021, arXiv:2104.09864.
    """

    dim: int
    theta: float
    scaling: LinearScaling | YarnScaling | StoredFrequencies | None = None
    bounded: bool = False
    exact: bool = False


def table_rows(max_positions: int, max_seqlen: int) -> int:
    """The number of positions of a table: the model's, so that few tables exist, but not a number that only
    config.json gives and no text reaches."""
    return max(min(max_positions, MOST_ROWS), max_seqlen)


def rotary_table(spec: RotarySpec, positions: int, device: torch.device | str) -> Tensor:
    """float32 (positions, dim): the cosines of the dim / 2 angles of each position, then their sines.

    The angles are computed as in transformers: float32 frequencies times float32 positions, or both in float64 if they
    are exact.
    """
    device = torch.device(device)
    if torch.compiler.is_compiling():  # which cannot trace a cached function
        return _compute_table(spec, positions, device)
    return _cached_table(spec, 1 << max(0, positions - 1).bit_length(), device)[:positions]


def plain_frequencies(dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """(dim / 2,): theta^(-2i/dim)."""
    return 1.0 / _powers(dim, theta, dtype)


def _powers(dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(dtype) / dim)


@cache  # Never dropped, because a CUDA graph may read a table again. Rounding up to powers of two keeps them few.
def _cached_table(spec: RotarySpec, positions: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _compute_table(spec, positions, device)


def _compute_table(spec: RotarySpec, positions: int, device: torch.device) -> Tensor:
    scaling, dtype = spec.scaling, torch.float64 if spec.exact else torch.float32
    frequencies = (
        plain_frequencies(spec.dim, spec.theta, dtype)
        if scaling is None
        else scaling.frequencies(spec.dim, spec.theta)
    )
    angles = torch.outer(torch.arange(positions, dtype=dtype), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    return (table if scaling is None else table * scaling.amplitude).to(device)
