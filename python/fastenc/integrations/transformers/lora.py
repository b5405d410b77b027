"""PEFT's LoRA on the linear layers of a live model, in the form of this library's layer adaptations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.hooks import has_hooks
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.ops.gemm import linear


def is_lora_linear(module: Any) -> bool:
    module_class = type(module)
    return module_class.__module__ == "peft.tuners.lora.layer" and module_class.__name__ == "Linear"


def base_linear(module: Any) -> Any:
    """The linear layer without LoRA."""
    return module.base_layer if is_lora_linear(module) else module


def unsupported_reason(module: Any) -> str | None:
    """Why PEFT's layer does not compute W x + b + scaling B A dropout(x), or None if it does."""
    if module.disable_adapters and module.merged_adapters:
        return "is merged and disabled, and its own forward subtracts it"
    if module.fan_in_fan_out:
        return "has transposed weights (fan_in_fan_out)"
    for name in _active(module):
        if name in module.lora_variant:
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
        inner = linear(dropout(x.to(a.weight.dtype)), a.weight, a.bias)
        addition = linear(inner, b.weight, b.bias) * module.scaling[name]
        total = addition if total is None else total + addition
    return x.new_zeros(x.shape[0], base_linear(module).out_features) if total is None else total
