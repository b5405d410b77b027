"""Frozen layers on a CPU, without asking the ways (:mod:`fastenc.nn.ways`) about each layer of each call.

What a way asks of the weights, freezing asks once. What it asks of a call is the same for all layers, so the stack asks
once. That spares one text of 20 tokens 0.1 ms of its 1.4 to 3.4 (MiniLM, AMD Zen 4, two threads).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastenc.nn.features import given_fields
from fastenc.nn.layer_call import DERIVED_INPUTS, HEAD_NORMS, OWN_NORMS, FixedArguments, Prepared
from fastenc.nn.layer_spec import (
    NO_DROPOUT,
    AttentionInputs,
    LayerDropout,
    LayerSpec,
    LayerState,
    LayerWeights,
)
from fastenc.nn.ways import cpu_inference, int8_inference
from fastenc.ops import dispatch

# The features of layers, and of inputs, that the same two ops compute in every call.
TAKES = (
    frozenset({"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated"})
    | {"key_heads"}
    | HEAD_NORMS
    | OWN_NORMS
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
)

# Runs the layer of this number among the modules: (number, state, inputs, pre_norm) -> the next state.
RunLayer = Callable[[int, LayerState, AttentionInputs, bool], LayerState]


class AdaptableLayer(Protocol):
    def adapted(self) -> object | None: ...


def with_fixed_arguments(prepared: Prepared, weights: LayerWeights, spec: LayerSpec) -> Prepared:
    """The copies with the arguments that no call changes, if the layer always runs in the same two ops."""
    if (spec.features | given_fields(weights)) - TAKES:
        return prepared
    if prepared.int8 is not None:
        fixed = int8_inference.fixed_arguments(weights, prepared.int8, spec)
    elif prepared.packed is not None:
        fixed = cpu_inference.fixed_arguments(weights, prepared.packed, spec)
    else:
        return prepared
    return prepared._replace(fixed=FixedArguments(*(tuple(map(_widened, part)) for part in fixed)))


def _widened(argument: object) -> object:
    """A bias or a norm's weight in float32, as the ops compute with it; other arguments as they are."""
    if isinstance(argument, Tensor) and argument.dim() == 1:
        return argument.float()
    return argument


def runner(
    x: Tensor,
    inputs: AttentionInputs,
    layers: Sequence[AdaptableLayer],
    dropouts: Sequence[LayerDropout],
    frozen: Sequence[Prepared] | None,
) -> RunLayer | None:
    """A function that runs the stack's frozen layers in this call, or None if the ways must be asked.

    Args:
        x, inputs: those of the first layer.
        layers: the modules that compute layers, each with its copies in ``frozen``. Their weights are not read.
    """
    if frozen is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if x.device.type != "cpu" or dispatch.autocast_dtype("cpu"):
        return None
    if given_fields(inputs, DERIVED_INPUTS) - TAKES:
        return None
    if torch_module._has_any_global_hook() or any(map(_does_more, layers)):
        return None
    if any(dropout is not NO_DROPOUT and dropout.probabilities() for dropout in dropouts):
        return None
    arguments = [each.fixed for each in frozen if each.fixed is not None]
    if len(arguments) < len(frozen):
        return None
    attend: Callable[..., Tensor]
    end: Callable[..., LayerState]
    if all(each.int8 is not None for each in frozen):
        if x.dtype != torch.float32:
            return None
        attend, end = int8_inference.attend, int8_inference.after_attention
    else:
        dtypes = {each.weights.down_weight.dtype for each in frozen if each.weights is not None}
        few_rows = cpu_inference.has_few_rows(x)
        shared = few_rows or cpu_inference.shares_sequences(x, inputs.max_seqlen)
        if dtypes != {x.dtype} or not shared:
            return None
        attend = partial(cpu_inference.attend_in_one_op, few_rows)
        end = partial(cpu_inference.after_attention, few_rows)

    def run(number: int, state: LayerState, inputs: AttentionInputs, pre_norm: bool) -> LayerState:
        attention, after_attention = arguments[number]
        attended = attend(state.x, inputs, attention)
        return end(attended, state.residual, after_attention, pre_norm)

    return run


def _does_more(layer: AdaptableLayer) -> bool:
    """Whether a call of the layer does more than its description says."""
    if isinstance(layer, nn.Module):
        hooks = layer._forward_hooks or layer._forward_pre_hooks
        if hooks or "forward" in vars(layer) or layer._compiled_call_impl is not None:
            return True
    return layer.adapted() is not None
