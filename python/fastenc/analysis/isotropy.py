"""How alike any two vectors of a model are, and which dimensions make them so."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Isotropy:
    """The exact mean cosine of all pairs of different vectors, from sums over the vectors alone.

        u_i = x_i / |x_i|,   anisotropy = (|Σ u_i|² - n) / (n (n - 1))
        contribution of dimension k = ((Σ u_ik)² - Σ u_ik²) / (n (n - 1)),  which add up to the anisotropy

    In float64, in parts, and mergeable across processes as :class:`fastenc.analysis.Moments` is. A vector of zeros
    has no direction and is left out.

    Fields:
        count: vectors seen.
        sums, squares: float64 (width,), Σ u_i and Σ u_i².
    Source: Ethayarajh 2019, arXiv:1909.00512; Timkey and van Schijndel 2021, arXiv:2109.04404.
    """

    count: int
    sums: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, width: int) -> "Isotropy":
        return cls(0, *torch.zeros(2, width, dtype=torch.float64))

    def add(self, vectors: Tensor) -> None:
        """Take (count, width) more, on any device."""
        unit = F.normalize(vectors.detach().to("cpu", torch.float64), dim=1, eps=0)
        unit = unit[unit.isfinite().all(1)]
        self.merge(Isotropy(len(unit), unit.sum(0), unit.square().sum(0)))

    def merge(self, other: "Isotropy") -> None:
        """Add what another has seen."""
        self.count += other.count
        self.sums = self.sums + other.sums
        self.squares = self.squares + other.squares

    @property
    def contributions(self) -> Tensor:
        """float64 (width,): what each dimension adds to the anisotropy.

        Raises: ValueError for fewer than two vectors.
        """
        if self.count < 2:
            raise ValueError(f"a mean cosine needs two vectors or more, got {self.count}")
        return (self.sums.square() - self.squares) / (self.count * (self.count - 1))

    @property
    def anisotropy(self) -> float:
        """The mean cosine of two different vectors, from -1 / (count - 1) to 1."""
        return float(self.contributions.sum())

    @property
    def shares(self) -> Tensor:
        """float64 (width,): each dimension's share of the anisotropy; they sum to 1."""
        return self.contributions / self.contributions.sum()


def self_similarity(unit_sums: Tensor, counts: Tensor) -> Tensor:
    """Mean cosine of different occurrences of each word, from the sums of its vectors' unit vectors.

        s_w = (|Σ u|² - n_w) / (n_w (n_w - 1))

    Args:
        unit_sums: (words, width); counts: (words,), occurrences.
    Returns: float64 (words,), NaN for a word that occurs once.
    Source: Ethayarajh 2019, arXiv:1909.00512.
    """
    n = counts.double()
    return (unit_sums.double().square().sum(1) - n) / (n * (n - 1)).where(n > 1, torch.nan)
