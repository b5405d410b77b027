"""Isotropy: the mean cosine of a model's vectors, and the dimensions that it comes from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.analysis.errors import TooFewData


@dataclass
class Isotropy:
    """The exact mean cosine of all pairs of different vectors, computed from two sums over the vectors.

        u_i = x_i / |x_i|,   anisotropy = (|Σ u_i|² - n) / (n (n - 1))
        contribution of dimension k = ((Σ u_ik)² - Σ u_ik²) / (n (n - 1));  the contributions add up to the anisotropy

    The sums are in float64. Vectors can be added in several calls, and the sums of several processes can be merged. A
    zero vector has no direction and is left out.

    Fields:
        count: number of vectors.
        sums, squares: float64 (width,), Σ u_i and Σ u_i².
    Source: Ethayarajh 2019, arXiv:1909.00512; Timkey and van Schijndel 2021, arXiv:2109.04404.
    """

    count: int
    sums: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, width: int) -> "Isotropy":
        """The sums of no vectors."""
        return cls(0, *torch.zeros(2, width, dtype=torch.float64))

    def add(self, vectors: Tensor) -> None:
        """Add vectors (count, width) on any device."""
        unit = F.normalize(vectors.detach().to("cpu", torch.float64), dim=1, eps=0)
        unit = unit[unit.isfinite().all(1)]
        self.merge(Isotropy(len(unit), unit.sum(0), unit.square().sum(0)))

    def merge(self, other: "Isotropy") -> None:
        """Add the vectors of another instance."""
        self.count += other.count
        self.sums = self.sums + other.sums
        self.squares = self.squares + other.squares

    @property
    def contributions(self) -> Tensor:
        """The contribution of each dimension to the anisotropy: float64 (width,).

        Raises: TooFewData (a ValueError) for fewer than two vectors.
        """
        if self.count < 2:
            raise TooFewData(
                f"a mean cosine needs at least two vectors, got {self.count}: give longer texts"
            )
        return (self.sums.square() - self.squares) / (self.count * (self.count - 1))

    @property
    def anisotropy(self) -> float:
        """The mean cosine of two different vectors, from -1 / (count - 1) to 1."""
        return float(self.contributions.sum())

    @property
    def shares(self) -> Tensor:
        """The share of each dimension in the anisotropy: float64 (width,), with the sum 1."""
        return self.contributions / self.contributions.sum()


def self_similarity(unit_sums: Tensor, counts: Tensor) -> Tensor:
    """Mean cosine of different occurrences of each word.

        s_w = (|Σ u|² - n_w) / (n_w (n_w - 1)),   u: the unit vectors of the word's n_w occurrences

    Args:
        unit_sums: (words, width), Σ u of each word.
        counts: (words,), number of occurrences of each word.
    Returns: float64 (words,), NaN for a word that occurs once.
    Source: Ethayarajh 2019, arXiv:1909.00512.
    """
    n = counts.double()
    return (unit_sums.double().square().sum(1) - n) / (n * (n - 1)).where(n > 1, torch.nan)
