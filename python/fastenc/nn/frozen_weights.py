"""Weights that were packed or stacked once, on the promise that they do not change."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fastenc.nn.cpu_inference import PackedWeights, pack, packing_reason, weights_reason
from fastenc.nn.layer_spec import LayerWeights, stacked

# A layer's weights packed, or stacked where it does not run on packed weights, as on a GPU.
FrozenLayer = PackedWeights | LayerWeights

# Frozen for the length of a call, by the object that holds them: other threads and calls do not see them.
_during_call: ContextVar[dict[int, list[FrozenLayer]] | None] = ContextVar(
    "frozen weights of a call", default=None
)


class FrozenWeights(nn.Module):
    """The frozen layers of one encoder, or none.

    They are dropped by everything that announces other weights: ``train()``, a call with gradients, moving to another
    device or dtype, loading a state dict. A copy of the model starts without them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[FrozenLayer] | None = None

    def freeze(self, owner: Any) -> None:
        self._layers = frozen_layers(owner)

    def drop(self) -> None:
        self._layers = None

    def current(self, owner: Any) -> list[FrozenLayer] | None:
        """The frozen layers that a call may use, by the layer's module."""
        if torch.compiler.is_compiling():
            return None
        if torch.is_grad_enabled():
            self.drop()
            return None
        of_call = (_during_call.get() or {}).get(id(self))
        return self._layers if of_call is None else of_call

    @contextmanager
    def during_call(self, owner: Any, calls: int) -> Iterator[None]:
        """Take the weights as frozen for several calls of the encoder inside; one call alone packs them anyway."""
        if calls < 2 or self._layers is not None:
            yield
            return
        token = _during_call.set({**(_during_call.get() or {}), id(self): frozen_layers(owner)})
        try:
            yield
        finally:
            _during_call.reset(token)

    def train(self, mode: bool = True) -> "FrozenWeights":
        if mode:
            self.drop()
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):
        self.drop()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.drop()
        super()._load_from_state_dict(*arguments, **options)

    def __deepcopy__(self, memo: dict) -> "FrozenWeights":
        copy = FrozenWeights()
        copy.training = self.training
        return copy

    def __reduce__(self):
        return FrozenWeights, ()


def frozen_layers(owner: Any) -> list[FrozenLayer]:
    """Every layer's weights packed, or stacked where the layer does not run on packed weights.

    Args:
        owner: has ``layer_weights()``, the weights and a description of every layer's module.
    """
    with torch.no_grad():
        return [
            stacked(weights)
            if weights_reason(weights, spec) or packing_reason(weights)
            else pack(weights)
            for weights, spec in owner.layer_weights()
        ]
