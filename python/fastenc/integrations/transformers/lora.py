"""PEFT's LoRA and DoRA on the linear layers of a live model, in the form of this library's layer adaptations.

DoRA: Liu et al. 2024, arXiv:2402.09353.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.hooks import has_hooks
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.evaluation_mode import trains
from fastenc.ops import dispatch
from fastenc.ops.gemm import linear

DORA = "peft.tuners.lora.variants.DoraLinearVariant"


def is_lora_linear(module: Any) -> bool:
    module_class = type(module)
    return module_class.__module__ == "peft.tuners.lora.layer" and module_class.__name__ == "Linear"


def base_linear(module: Any) -> Any:
    """The linear layer without LoRA."""
    return module.base_layer if is_lora_linear(module) else module


def unsupported_reason(module: Any) -> str | None:
    """Why PEFT's layer computes neither W x + b + scaling B A dropout(x) nor a DoRA, or None if it does."""
    if module.disable_adapters and module.merged_adapters:
        return "is merged and disabled, and its own forward subtracts it"
    if module.fan_in_fan_out:
        return "has transposed weights (fan_in_fan_out)"
    for name in _active(module):
        if name in module.lora_variant and not _is_only_dora(module):
            return f"is a variant ({type(module.lora_variant[name]).__name__})"
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        if type(a) is not nn.Linear or type(b) is not nn.Linear:
            return "has matrices that are not linear layers"
        if type(dropout) not in (nn.Dropout, nn.Identity):
            return f"has a {type(dropout).__name__} as its dropout"
    if any(has_hooks(inner) or "forward" in inner.__dict__ for inner in module.modules()):
        return "has hooks or a replaced forward"
    return None


def _active(module: Any) -> list[str]:
    """The names of the LoRA matrices that a call uses."""
    if module.disable_adapters or module.merged_adapters:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def _is_only_dora(module: Any) -> bool:
    """Whether a call uses one adapter, and it is DoRA. A DoRA after others would scale what they have added, too."""
    variants = [type(module.lora_variant.get(name)) for name in _active(module)]
    return [f"{v.__module__}.{v.__name__}" for v in variants] == [DORA]


class LiveLowRank(nn.Module):
    """The LoRA additions of PEFT's layers to one matrix product. The matrices are read in every call.

    Args:
        modules: the linear layers whose weights are stacked in the product, with or without LoRA.
    """

    def __init__(self, modules: Sequence[Any]):
        super().__init__()
        # A tuple, so that they are not registered as submodules: they belong to the live model.
        self._linears = tuple(modules)

    def is_active(self) -> bool:
        return any(is_lora_linear(module) and _active(module) for module in self._linears)

    def forward(self, x: Tensor) -> Tensor:
        added = [_addition(module, x) for module in self._linears]
        return added[0] if len(added) == 1 else torch.cat(added, -1)


class LiveLora(LayerAdaptation):
    """What PEFT's LoRA adds to one layer of a live model, while one of its adapters is switched on."""

    def is_active(self) -> bool:
        return any(added.is_active() for added in self.low_rank.values())  # type: ignore[operator]


def _addition(module: Any, x: Tensor) -> Tensor:
    total = None
    for name in _active(module) if is_lora_linear(module) else ():
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        cast = x.to(a.weight.dtype)
        dropped = dropout(cast) if trains(dropout) else cast
        addition = (
            linear(linear(dropped, a.weight, a.bias), b.weight, b.bias) * module.scaling[name]
        )
        if name in module.lora_variant:
            addition = _with_magnitudes(module, name, dropped, addition)
        total = addition if total is None else total + addition
    return x.new_zeros(x.shape[0], base_linear(module).out_features) if total is None else total


def _with_magnitudes(module: Any, name: str, x: Tensor, low_rank: Tensor) -> Tensor:
    """What DoRA adds to W x + b: (s - 1) W x + s low_rank, with s = magnitude / |W + scaling B A| for each output.

    The norms are constants of the gradient, as in PEFT.
    """
    weight = module.base_layer.weight.to(x.dtype)
    with torch.no_grad(), dispatch.no_autocast(x):
        product = module.lora_B[name].weight @ module.lora_A[name].weight
        norms = torch.linalg.norm(weight + module.scaling[name] * product, dim=1)
    scale = module.lora_magnitude_vector[name].weight / norms
    return (scale - 1) * linear(x, weight) + scale * low_rank
