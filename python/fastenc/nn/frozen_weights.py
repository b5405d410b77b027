"""Copies of weights, packed or stacked for the kernels once, on the promise that the weights do not change."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.frozen_copies import INT8, FrozenCopies, check_dtype, values_reason
from fastenc.nn.frozen_layers import FrozenLayers, with_fixed_arguments
from fastenc.nn.layer_call import Prepared, Store, unchanged
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights, stacked
from fastenc.nn.ways import cpu_weights, int8_inference
from fastenc.nn.weight_block import ByteCounter, WeightBlock, without_values

# Layers that are frozen during one call of a function such as encode(): id of the FrozenWeights → layers. Other threads
# do not see them.
_during_call: ContextVar[dict[int, FrozenLayers] | None] = ContextVar(
    "frozen weights of a call", default=None
)


class WeightsOwner(Protocol):
    """An encoder, or what reads the weights of one."""

    def layer_weights(self) -> Sequence[tuple[LayerWeights, LayerSpec]]:
        """(weights, description) of every module that computes layers."""

    def position_rows(self) -> torch.Tensor | None:
        """The rows of the table of relative positions that all layers project, or None without one."""

    def layer_adaptations(self) -> Sequence[LayerAdaptation | None]:
        """What is added to each of these modules (PEFT's LoRA, :mod:`fastenc.adapt`), or None."""


class FrozenWeights(FrozenCopies[WeightsOwner, FrozenLayers]):
    """The frozen layers of one encoder or decoder."""

    @torch.no_grad()
    def copies_of(self, owner: WeightsOwner, dtype: str | None) -> FrozenLayers:
        """The copies of every layer's weights in one block of memory.

        Raises: ValueError for another dtype, and for "int8" if a layer cannot run in 8 bits.
        """
        check_dtype(dtype)
        if dtype == INT8:
            _check_int8(owner)
        counter = ByteCounter()
        for weights, spec in owner.layer_weights():
            _packing(weights, spec, dtype)(without_values(weights), counter.count)
        return FrozenLayers(frozen_layers(owner, dtype, WeightBlock(counter.size).store))

    @property
    def in_8_bits(self) -> bool:
        return self._copies is not None and self._copies.in_8_bits

    def replace_weights(self, owner: Any) -> None:
        """Freeze in 8 bits, and drop the weights of the layers' linear modules.

        Args: owner: an encoder or a decoder of ours, in evaluation mode on a CPU.
        """
        quantised = self.copies_of(owner, INT8)
        for linear in _linear_modules(owner.layers):
            # Shape and dtype stay. It is no parameter any more: to() would fail for want of values.
            shape_alone = torch.empty_like(linear.weight, device="meta")
            del linear.weight
            linear.weight = shape_alone
        layers_weights = [weights for weights, _ in owner.layer_weights()]
        self._copies = FrozenLayers(
            each._replace(weights=weights)
            for each, weights in zip(quantised, layers_weights, strict=True)
        )
        self._replaces_weights = True

    def _of_call(self) -> FrozenLayers | None:
        of_call = (_during_call.get() or {}).get(id(self))
        return self._copies if of_call is None else of_call

    @contextmanager
    def during_call(self, owner: WeightsOwner, calls: int) -> Iterator[None]:
        """Inside the block, take the weights as frozen, if the encoder is to be called at least twice in it.

        A single call would not gain from it, because it packs the weights once anyway.
        """
        frozen_already = self._copies is not None or id(self) in (_during_call.get() or {})
        if calls < 2 or frozen_already:
            yield
            return
        frozen = FrozenLayers(frozen_layers(owner))
        token = _during_call.set({**(_during_call.get() or {}), id(self): frozen})
        try:
            yield
        finally:
            _during_call.reset(token)


def _linear_modules(layers: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """The linear modules whose weights are in 8 bits. The projections of global tokens stay in float32."""
    for layer in layers:
        for part in (layer, *(getattr(layer, name, None) for name in ("cross", "vectors"))):
            for name, module in () if part is None else part.named_children():
                if isinstance(module, nn.Linear) and name != "global_qkv":
                    yield module


@torch.no_grad()
def frozen_layers(
    owner: WeightsOwner, dtype: str | None = None, store: Store = unchanged
) -> Iterator[Prepared]:
    """The packed weights of every layer, or its stacked weights if it does not run on packed ones."""
    rows = owner.position_rows()
    for weights, spec in owner.layer_weights():
        copies = _packing(weights, spec, dtype)(weights, store)._replace(weights=weights)
        if copies.stacked is None:
            copies = copies._replace(positions=cpu_weights.project(rows, weights, spec))
        yield with_fixed_arguments(copies, weights, spec)


def _packing(
    weights: LayerWeights, spec: LayerSpec, dtype: str | None
) -> Callable[[LayerWeights, Store], Prepared]:
    """What brings a layer's weights into the form in which it runs."""
    if dtype == INT8:
        return lambda w, store: Prepared(int8=int8_inference.pack(w, spec, store))
    if cpu_weights.weights_reason(weights, spec) or cpu_weights.packing_reason(weights):
        return lambda w, store: Prepared(stacked=stacked(w))
    return lambda w, store: Prepared(packed=cpu_weights.pack(w, store))


def _check_int8(owner: WeightsOwner) -> None:
    """Raises: ValueError for a layer that cannot run in 8 bits."""
    for number, reason in enumerate(int8_reasons(owner)):
        if reason is not None:
            raise ValueError(
                f"layer {number} of the model cannot run in int8: {reason}: leave out dtype"
            )


def int8_reasons(owner: WeightsOwner) -> list[str | None]:
    """For each module that computes layers: why it cannot run in 8 bits, or None."""
    return [
        int8_inference.weights_reason(weights, spec)
        or (
            None
            if added is None
            else "it has LoRA or another adaptation, which must be merged into its weights first"
        )
        or next(filter(None, map(values_reason, weights.tensors())), None)
        for (weights, spec), added in zip(
            owner.layer_weights(), owner.layer_adaptations(), strict=True
        )
    ]
