"""Standardization of vectors to mean 0 and standard deviation 1 in every dimension."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc.models.checkpoint import read_json, read_tensor_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"


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
        save_file = require("safetensors.torch", extra="models").save_file
        width = len(self.mean)
        scale = 1 / self.std.double()
        tensors = {
            "linear.weight": torch.diag(scale).float(),
            "linear.bias": (-self.mean.double() * scale).float(),
        }
        values = {
            "in_features": width,
            "out_features": width,
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path))
        text = json.dumps(values, indent=2) + "\n"
        write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, folder: Path) -> "Standardization | None":
        """The standardization that a Dense module's files describe, or None if the module computes something else."""
        values = read_json(folder / CONFIG)
        if not str(values.get("activation_function", "")).endswith("Identity"):
            return None
        if values.get("use_residual") or not (folder / WEIGHTS).exists():
            return None
        tensors = read_tensor_file(folder / WEIGHTS)
        weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
        if weight is None or bias is None or weight.shape != (bias.numel(), bias.numel()):
            return None
        scale = weight.diagonal().double()
        if not torch.equal(weight, torch.diag(weight.diagonal())) or not (scale > 0).all():
            return None
        return cls((-bias.double() / scale).float(), (1 / scale).float())
