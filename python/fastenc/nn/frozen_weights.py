"""Copies of weights, packed or stacked for the kernels once, on the promise that the weights do not change."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.frozen_layers import FrozenLayers, with_fixed_arguments
from fastenc.nn.layer_call import Prepared, Store, unchanged
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights, stacked
from fastenc.nn.ways import cpu_weights, int8_inference
from fastenc.nn.weight_block import ByteCounter, WeightBlock, join, split, without_values
from fastenc.ops.derivatives import in_forward_mode

INT8 = "int8"

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


class FrozenWeights(nn.Module):
    """The frozen layers of one encoder; without any, the encoder computes with its weights.

    They are dropped by all that may change the weights: ``train()``, a call with gradients, moving to another device or
    dtype, loading a state dict. A copy of the model does not have them.

    They may be all that a model has of its layers' weights (:meth:`replace_weights`). Then nothing drops them, and what
    needs the weights is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: FrozenLayers | None = None
        self._replaces_weights = False

    def keep(self, copies: list[Prepared]) -> None:
        """Freeze: keep the copies of the owner's weights that :func:`copies_of` made."""
        self._layers = FrozenLayers(copies)

    @property
    def in_8_bits(self) -> bool:
        return self._layers is not None and self._layers.in_8_bits

    def replace_weights(self, owner: WeightsOwner, layers: Iterable[nn.Module]) -> None:
        """Freeze in 8 bits, and drop the weights of the layers' linear modules.

        Args: owner: an encoder of ours, in evaluation mode on a CPU; layers: its layers.
        """
        quantised = copies_of(owner, INT8)
        sublayers = (each for layer in layers for each in (layer, getattr(layer, "vectors", None)))
        named = (pair for each in sublayers if each is not None for pair in each.named_children())
        for name, linear in named:
            # The projections of global tokens stay in float32.
            if not isinstance(linear, nn.Linear) or name == "global_qkv":
                continue
            # Shape and dtype stay. It is no parameter any more: to() would fail for want of values.
            shape_alone = torch.empty_like(linear.weight, device="meta")
            del linear.weight
            linear.weight = shape_alone
        layers_weights = [weights for weights, _ in owner.layer_weights()]
        self._layers = FrozenLayers(
            each._replace(weights=weights)
            for each, weights in zip(quantised, layers_weights, strict=True)
        )
        self._replaces_weights = True

    def require_weights(self, what: str) -> None:
        """Raises: ValueError if these copies are all that the model has of its layers' weights."""
        if self._replaces_weights:
            raise ValueError(
                f'{what} needs the weights in float32, this model was loaded with dtype="int8" and has them in 8 bits '
                "only: load it without dtype"
            )

    def check_move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raises: ValueError if ``fn``, applied to every tensor of the model, would end computing in 8 bits."""
        if self._replaces_weights:
            moved = fn(torch.empty(0))
            if moved.device.type != "cpu" or moved.dtype != torch.float32:
                self.require_weights(f"moving to {moved.device.type} and {moved.dtype}")

    def drop(self) -> None:
        self.require_weights("unfreeze")
        self._layers = None

    def drop_in_call_with_gradients(self) -> None:
        """Drop the copies if this call computes gradients: the optimizer's step after it changes the weights.

        Every call of the encoder must come here, whichever forward runs.
        """
        if torch.is_grad_enabled() or in_forward_mode():
            self.require_weights("a call with gradients (without torch.no_grad())")
            self.drop()

    def current(self) -> FrozenLayers | None:
        """The frozen layers that this call may use, one for each module that computes layers; None: none."""
        self.drop_in_call_with_gradients()
        if torch.is_grad_enabled() or (
            torch.compiler.is_compiling() and not self._replaces_weights
        ):
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
        frozen = FrozenLayers(frozen_layers(owner))
        token = _during_call.set({**(_during_call.get() or {}), id(self): frozen})
        try:
            yield
        finally:
            _during_call.reset(token)

    def train(self, mode: bool = True) -> "FrozenWeights":
        if mode:
            self.require_weights("train()")
            self.drop()
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):
        self.check_move(fn)
        if not self._replaces_weights:
            self.drop()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.require_weights("load_state_dict")
        self.drop()
        super()._load_from_state_dict(*arguments, **options)

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.require_weights("state_dict")
        super()._save_to_state_dict(*arguments, **options)

    def __deepcopy__(self, memo: dict) -> "FrozenWeights":
        copy = FrozenWeights()
        copy.training = self.training
        if self._replaces_weights:
            copy._layers, copy._replaces_weights = self._layers, True
        return copy

    def __reduce__(self):
        if not self._replaces_weights or self._layers is None:
            return (FrozenWeights, ())
        return (_replacing, split(self._layers))


def _replacing(block: Tensor, layers: list[Prepared]) -> FrozenWeights:
    frozen = FrozenWeights()
    frozen._layers, frozen._replaces_weights = FrozenLayers(join(block, layers)), True
    return frozen.eval()


@torch.no_grad()
def copies_of(owner: WeightsOwner, dtype: str | None = None) -> list[Prepared]:
    """The copies of every layer's weights in one block of memory, in 8 bits if ``dtype`` is "int8".

    Raises: ValueError for another dtype, and for "int8" if a layer cannot run in 8 bits.
    """
    if dtype is not None:
        _check_int8(owner, dtype)
    counter = ByteCounter()
    for weights, spec in owner.layer_weights():
        _packing(weights, spec, dtype)(without_values(weights), counter.count)
    return [*frozen_layers(owner, dtype, WeightBlock(counter.size).store)]


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


def _check_int8(owner: WeightsOwner, dtype: str) -> None:
    """Raises: ValueError for a dtype other than "int8", and for a layer that cannot run in 8 bits."""
    if dtype != INT8:
        raise ValueError(
            f'the dtype of frozen weights must be "int8" or None, got {dtype!r}: give one of them'
        )
    for number, reason in enumerate(int8_reasons(owner)):
        if reason is not None:
            raise ValueError(
                f"layer {number} of the model cannot run in int8: {reason}: leave out dtype"
            )
    for number, (weights, _) in enumerate(owner.layer_weights()):
        for tensor in weights.tensors():
            if not torch.stack(tensor.aminmax()).isfinite().all():
                raise ValueError(
                    f"int8 needs finite weights, got a weight of shape {tuple(tensor.shape)} with NaN or infinity "
                    f"in layer {number}: load other weights"
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
        for (weights, spec), added in zip(
            owner.layer_weights(), owner.layer_adaptations(), strict=True
        )
    ]
