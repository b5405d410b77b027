"""Copies of weights, packed or stacked for the kernels once, on the promise that the weights do not change."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad

from fastenc.nn.layer_call import Prepared
from fastenc.nn.layer_spec import LayerSpec, LayerWeights, stacked
from fastenc.nn.ways.cpu_inference import pack, packing_reason, weights_reason

# Layers that are frozen during one call of a function such as encode(): id of the FrozenWeights → layers. Other threads
# do not see them.
_during_call: ContextVar[dict[int, list[Prepared]] | None] = ContextVar(
    "frozen weights of a call", default=None
)


class WeightsOwner(Protocol):
    """An encoder, or what reads the weights of one."""

    def layer_weights(self) -> Sequence[tuple[LayerWeights, LayerSpec]]:
        """(weights, description) of every module that computes layers."""


class FrozenWeights(nn.Module):
    """The frozen layers of one encoder; without any, the encoder computes with its weights.

    They are dropped by all that may change the weights: ``train()``, a call with gradients, moving to another device or
    dtype, loading a state dict. A copy of the model does not have them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[Prepared] | None = None

    def freeze(self, owner: WeightsOwner) -> None:
        self._layers = frozen_layers(owner)

    def drop(self) -> None:
        self._layers = None

    def drop_in_call_with_gradients(self) -> None:
        """Drop the copies if this call computes gradients: the optimizer's step after it changes the weights.

        Every call of the encoder must come here, whichever forward runs.
        """
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.drop()

    def current(self) -> list[Prepared] | None:
        """The frozen layers that this call may use, one for each module that computes layers; None: none."""
        self.drop_in_call_with_gradients()
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        of_call = (_during_call.get() or {}).get(id(self))
        return self._layers if of_call is None else of_call

    @contextmanager
    def during_call(self, owner: WeightsOwner, calls: int) -> Iterator[None]:
        """Inside the block, take the weights as frozen, if the encoder is to be called at least twice in it.

        A single call would not gain from it, because it packs the weights once anyway.
        """
        frozen_already = self._layers is not None or id(self) in (_during_call.get() or {})
        if calls < 2 or frozen_already:
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


def frozen_layers(owner: WeightsOwner) -> list[Prepared]:
    """The packed weights of every layer, or its stacked weights if it does not run on packed ones."""
    with torch.no_grad():
        return [
            Prepared(stacked=stacked(weights))
            if weights_reason(weights, spec) or packing_reason(weights)
            else Prepared(packed=pack(weights))
            for weights, spec in owner.layer_weights()
        ]
