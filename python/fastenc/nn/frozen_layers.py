"""Frozen layers on a CPU, without asking the ways (:mod:`fastenc.nn.ways`) about each layer of each call.

What a way asks of the weights, freezing asks once. What it asks of a call is the same for all layers, so the stack asks
once. Of few tokens, one op runs all layers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fastenc.nn.features import given_fields
from fastenc.nn.layer_call import (
    DERIVED_INPUTS,
    HEAD_NORMS,
    NO_TENSOR,
    OUTPUT_TOKENS,
    OWN_NORMS,
    PLAIN_LAYERS,
    ArgumentsByType,
    FixedArguments,
    Prepared,
)
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, rows_of
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights
from fastenc.nn.ways import cpu_inference, cpu_weights, int8_inference
from fastenc.nn.weight_block import join, split
from fastenc.ops import dispatch

# The features of layers, and of inputs, that the same two ops compute in every call.
TAKES = PLAIN_LAYERS | HEAD_NORMS | OWN_NORMS | OUTPUT_TOKENS
# The features of a decoder's layers.
DECODER = frozenset({"cross_norm", "cross"})


class AdaptableLayer(Protocol):
    def adapted(self) -> object | None: ...


def with_fixed_arguments(prepared: Prepared, weights: LayerWeights, spec: LayerSpec) -> Prepared:
    """The copies with the arguments that no call changes, if the layer always runs in the same ops."""
    if (spec.features | given_fields(weights)) - TAKES - DECODER:
        return prepared
    if prepared.int8 is not None:
        fixed = int8_inference.fixed_arguments(weights, prepared.int8, spec)
    elif prepared.packed is not None:
        fixed = cpu_weights.fixed_arguments(weights, prepared.packed, spec)
    else:
        return prepared
    decoder = cpu_weights.decoder_arguments(weights, prepared.int8 or prepared.packed, spec)
    attention, after_attention = (tuple(map(_widened, part)) for part in fixed[:2])
    decoder = None if decoder is None else tuple(map(_widened, decoder))
    return prepared._replace(fixed=FixedArguments(attention, after_attention, decoder))


def _widened(argument: object) -> object:
    """A bias or a norm's weight in float32, as the ops compute with it; other arguments as they are."""
    if isinstance(argument, Tensor) and argument.dim() == 1:
        return argument.float()
    return argument


class FrozenLayers(list[Prepared]):
    """The copies of each module that computes layers, and what follows from all of them, which is computed once."""

    def __init__(self, copies: Iterable[Prepared]) -> None:
        super().__init__(copies)
        self._arguments: dict[tuple[int, ...], ArgumentsByType] = {}

    def __reduce__(self):
        return (_joined, split(self))

    @cached_property
    def in_two_ops(self) -> bool:
        decoders = any(each.weights is not None and each.weights.cross is not None for each in self)
        return not decoders and all(each.fixed is not None for each in self)

    @cached_property
    def in_8_bits(self) -> bool:
        return all(each.int8 is not None for each in self)

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the layers' weights."""
        return {each.weights.down_weight.dtype for each in self if each.weights is not None}

    @cached_property
    def decode_in_one_op(self) -> bool:
        """Whether one op takes the layers of a decoder (:mod:`fastenc.nn.decoder_step`)."""
        return all(each.fixed is not None and each.fixed.decoder is not None for each in self)

    def arguments(self, order: tuple[int, ...]) -> ArgumentsByType:
        """The fixed arguments of all layers, if they run ``in_two_ops``. order: the module of each layer."""
        return self._by_type(order, lambda fixed: (fixed.attention, fixed.after_attention))

    def decoder_arguments(self, order: tuple[int, ...]) -> ArgumentsByType:
        """The same for the op that they ``decode_in_one_op``."""
        return self._by_type(order, lambda fixed: (fixed.decoder, fixed.after_attention))

    def _by_type(
        self, order: tuple[int, ...], parts_of: Callable[[FixedArguments], tuple]
    ) -> ArgumentsByType:
        if order not in self._arguments:
            fixed = [each for number in order if (each := self[number].fixed) is not None]
            self._arguments[order] = ArgumentsByType.of(p for each in fixed for p in parts_of(each))
        return self._arguments[order]


def _joined(block: Tensor, layers: list[Prepared]) -> FrozenLayers:
    return FrozenLayers(join(block, layers))


class FrozenStack(NamedTuple):
    """Runs a stack's frozen layers in one call. Numbers are those of the modules that compute layers.

    Fields:
        attend: (x, attention's inputs, its fixed arguments) -> what is attended to.
        end: (that, the residual, the rest's fixed arguments, pre_norm) -> the next state.
        all_layers: the op of all layers if there are few tokens, else None: it keeps every state.
    """

    frozen: FrozenLayers
    attend: Callable[..., Tensor]
    end: Callable[..., LayerState]
    all_layers: Callable[..., list[Tensor]] | None

    def layer(
        self, number: int, state: LayerState, inputs: AttentionInputs, pre_norm: bool
    ) -> LayerState:
        fixed = self.frozen[number].fixed
        assert fixed is not None  # as frozen_stack has seen
        attended = rows_of(self.attend(state.x, inputs, fixed.attention), inputs.output_tokens)
        residual = rows_of(state.residual, inputs.output_tokens)
        return self.end(attended, residual, fixed.after_attention, pre_norm)

    def layers(
        self, order: tuple[int, ...], state: LayerState, inputs: Sequence[AttentionInputs]
    ) -> list[Tensor]:
        """What the stack yields after each layer, where ``all_layers`` is given. order: the module of each layer."""
        assert self.all_layers is not None
        output_tokens = inputs[-1].output_tokens
        return self.all_layers(
            *state,
            inputs[0].cu_seqlens,
            inputs[0].max_seqlen,
            tables([each.relative_bias for each in inputs]),
            tables([each.rotary for each in inputs]),
            None if output_tokens is None else output_tokens.contiguous(),
            len(order),
            *self.frozen.arguments(order),
        )


def tables(of_layers: list[Tensor | None]) -> list[Tensor]:
    """Each layer's tensor, ``NO_TENSOR`` for a layer without one; empty if no layer has one."""
    given = [NO_TENSOR if table is None else table for table in of_layers]
    return given if any(table is not NO_TENSOR for table in given) else []


def frozen_stack(
    x: Tensor,
    inputs: AttentionInputs,
    layers: Sequence[AdaptableLayer],
    dropouts: Sequence[LayerDropout],
    frozen: FrozenLayers | None,
) -> FrozenStack | None:
    """What runs the stack's frozen layers in this call, or None if the ways must be asked.

    Args:
        x, inputs: those of the first layer.
        layers: the modules that compute layers, each with its copies in ``frozen``. Their weights are not read.
    """
    if frozen is None or not runs_frozen(x, layers, dropouts) or not frozen.in_two_ops:
        return None
    if given_fields(inputs, DERIVED_INPUTS) - TAKES:
        return None
    few_rows = cpu_inference.has_few_rows(x)
    # What sees the ops, such as FlopCounterMode, sees those of each layer.
    in_one_op = few_rows and not is_in_torch_dispatch_mode()
    if frozen.in_8_bits:
        if x.dtype != torch.float32:
            return None
        op = torch.ops.fastenc.int8_layers if in_one_op else None
        return FrozenStack(frozen, int8_inference.attend, int8_inference.after_attention, op)
    shared = few_rows or cpu_inference.shares_sequences(x, inputs.max_seqlen)
    if frozen.dtypes != {x.dtype} or not shared:
        return None
    attend, end = partial(cpu_inference.attend_in_one_op, few_rows), cpu_inference.after_attention
    return FrozenStack(frozen, attend, end, torch.ops.fastenc.encoder_layers if in_one_op else None)


def runs_frozen(
    x: Tensor, layers: Sequence[AdaptableLayer], dropouts: Sequence[LayerDropout]
) -> bool:
    """Whether a call computes no more than what frozen layers' descriptions say."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if x.device.type != "cpu" or dispatch.autocast_dtype("cpu"):
        return False
    if torch_module._has_any_global_hook() or any(map(_does_more, layers)):
        return False
    return not any(each is not NO_DROPOUT and each.probabilities() for each in dropouts)


def _does_more(layer: AdaptableLayer) -> bool:
    """Whether a call of the layer does more than its description says."""
    if isinstance(layer, nn.Module):
        hooks = layer._forward_hooks or layer._forward_pre_hooks
        if hooks or "forward" in vars(layer) or layer._compiled_call_impl is not None:
            return True
    return layer.adapted() is not None
