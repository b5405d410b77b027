"""Mean and standard deviation of vectors, computed in one pass over batches, by one or several processes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastenc.models.embedding.standardization import Standardization


@dataclass
class Moments:
    """Count, mean and sum of squared deviations, in float64.

        mean_{A∪B} = mean_A + δ n_B / n,  squares_{A∪B} = squares_A + squares_B + δ² n_A n_B / n,  δ = mean_B - mean_A

    Fields:
        count: number of vectors.
        mean: float64 (width,).
        squares: float64 (width,), sum of the squared deviations from the mean.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def empty(cls, width: int) -> "Moments":
        """The moments of no vectors."""
        return cls(0, *torch.zeros(2, width, dtype=torch.float64))

    def add(self, vectors: Tensor) -> None:
        """Add vectors (count, width) on any device."""
        if not len(vectors):
            return
        wide = vectors.detach().to("cpu", torch.float64)
        mean = wide.mean(0)
        self.merge(Moments(len(wide), mean, (wide - mean).square_().sum(0)))

    def merge(self, other: "Moments") -> None:
        """Add the vectors of another instance."""
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
        """The standard deviation: float64 (width,), with the divisor count, not count - 1."""
        return (self.squares / max(self.count, 1)).sqrt()

    def standardization(self) -> Standardization:
        """The standardization with this mean and standard deviation.

        Raises: ValueError for a dimension with the standard deviation 0.
        """
        return Standardization(self.mean.float(), self.std.float())
