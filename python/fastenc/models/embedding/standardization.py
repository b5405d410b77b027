"""Standardization of vectors to mean 0 and standard deviation 1 in every dimension."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastenc.models.embedding.dense import Dense


@dataclass(frozen=True, eq=False)
class Standardization:
    """y = (x - mean) / std in every dimension.

    Saved as a Dense module of sentence-transformers with a diagonal weight, which computes the same.

    Fields:
        mean, std: (hidden_size,), floating point; every std positive.
    Raises: ValueError for other shapes, and a std that is not positive and finite.
    Source: Timkey and van Schijndel 2021, arXiv:2109.04404.
    """

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        if self.mean.dim() != 1 or self.mean.shape != self.std.shape:
            raise ValueError(
                "mean and std must have one shape (hidden_size,), got "
                f"{tuple(self.mean.shape)} and {tuple(self.std.shape)}"
            )
        usable = (self.std > 0) & self.std.isfinite() & self.mean.isfinite()
        if not usable.all():
            index = int((~usable).nonzero()[0])
            raise ValueError(
                f"every dimension needs a finite mean and a positive std, got {self.mean[index]:g} and "
                f"{self.std[index]:g} in dimension {index}: measure more vectors, or leave the standardization out"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """(..., hidden_size) → the same shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, std = (value.to(x.device, wide) for value in (self.mean, self.std))
        return ((x.to(wide) - mean) / std).to(x.dtype)

    def save(self, folder: Path) -> None:
        """Write the module's files."""
        scale = 1 / self.std.double()
        bias = -self.mean.double() * scale
        Dense(torch.diag(scale).float(), bias.float()).save(folder)

    @classmethod
    def of(cls, dense: Dense) -> "Standardization | None":
        """The standardization that a Dense module computes, or None if it computes something else."""
        weight, bias = dense.weight, dense.bias
        if dense.activation != "identity" or bias is None:
            return None
        scale = weight.diagonal().double()
        if weight.shape != (len(bias), len(bias)) or not (scale > 0).all():
            return None
        if not torch.equal(weight, torch.diag(weight.diagonal())):
            return None
        return cls((-bias.double() / scale).float(), (1 / scale).float())
