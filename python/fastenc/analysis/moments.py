"""Mean and standard deviation of any number of vectors, seen once, batch by batch, by any number of processes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastenc.models.standardization import Standardization


@dataclass
class Moments:
    """Count, mean and sum of squared deviations, in float64.

        mean_{A∪B} = mean_A + δ n_B / n,  squares_{A∪B} = squares_A + squares_B + δ² n_A n_B / n,  δ = mean_B - mean_A

    Fields:
        count: vectors seen.
        mean, squares: float64 (width,), the mean and the sum of squared deviations from it.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, width: int) -> "Moments":
        return cls(0, *torch.zeros(2, width, dtype=torch.float64))

    def add(self, vectors: Tensor) -> None:
        """Take (count, width) more, on any device."""
        if not len(vectors):
            return
        wide = vectors.detach().to("cpu", torch.float64)
        mean = wide.mean(0)
        self.merge(Moments(len(wide), mean, (wide - mean).square_().sum(0)))

    def merge(self, other: "Moments") -> None:
        """Add what another has seen, of other data."""
        count = self.count + other.count
        if not count:
            return
        delta = other.mean - self.mean
        self.mean = self.mean + delta * (other.count / count)
        self.squares = self.squares + other.squares
        self.squares += delta.square() * (self.count * other.count / count)
        self.count = count

    @property
    def std(self) -> Tensor:
        """float64 (width,), the standard deviation of what was seen (divided by count, not count - 1)."""
        return (self.squares / max(self.count, 1)).sqrt()

    def standardization(self) -> Standardization:
        """Raises: ValueError for a dimension that does not vary."""
        return Standardization(self.mean.float(), self.std.float())
