"""Linear layers after the pooling of a sentence-transformers folder, such as EmbeddingGemma's."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.models.checkpoint import read_json, read_tensor_file
from fastenc.ops.gemm import linear_in_one_order

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# sentence-transformers' name of a text's vector, and the keys with the names of a module's input and output.
VECTOR, NAMES = "sentence_embedding", ("module_input_name", "module_output_name")
# Activation → its name in the module's file.
ACTIVATIONS = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
}


@dataclass(frozen=True, eq=False)
class Dense:
    """y = a(x W^T + b): a module Dense of sentence-transformers.

    Fields:
        weight: (width, width before), float32. bias: (width,), or None.
        activation: "identity" or "tanh".
    """

    weight: Tensor
    bias: Tensor | None
    activation: str = "identity"

    def __call__(self, x: Tensor) -> Tensor:
        """(..., width before) → (..., width), computed in float32 or wider, in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(x.device, wide)
        y = linear_in_one_order(x.to(wide), self.weight.to(x.device, wide), bias)
        return (y.tanh() if self.activation == "tanh" else y).to(x.dtype)

    def save(self, folder: Path) -> None:
        """Write the module's files."""
        save_file = require("safetensors.torch", extra="models").save_file
        width, before = self.weight.shape
        values = {
            "in_features": before,
            "out_features": width,
            "bias": self.bias is not None,
            "activation_function": ACTIVATIONS[self.activation],
        }
        tensors = {"linear.weight": self.weight}
        if self.bias is not None:
            tensors["linear.bias"] = self.bias
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path))
        write_text_atomically(folder / CONFIG, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Dense | None":
        """The layer that a module's files describe, or None if the module computes something else.

        Raises: ValueError for a folder without the weight in safetensors.
        """
        values = read_json(folder / CONFIG)
        activation = str(values.get("activation_function", "")).rpartition(".")[2].lower()
        if activation not in ACTIVATIONS or values.get("use_residual"):
            return None
        # A module may read or write another value than the text's vector, such as its tokens' states.
        if any(values.get(name) not in (None, VECTOR) for name in NAMES):
            return None
        if not (folder / WEIGHTS).exists():
            raise ValueError(
                f"{folder} must have the weight of its Dense module in {WEIGHTS}, got no such file: write the model "
                "again with SentenceTransformer(...).save_pretrained(...)"
            )
        tensors = read_tensor_file(folder / WEIGHTS)
        weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
        if weight is None or weight.dim() != 2 or (bias is None) == bool(values.get("bias", True)):
            return None
        return cls(weight.float(), None if bias is None else bias.float(), activation)
