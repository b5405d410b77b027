"""Chooses how a call runs a layer: fused sublayers, CPU inference or single ops."""

from collections.abc import Mapping

from fastenc.nn import cpu_inference, fused_sublayers
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.frozen_weights import FrozenLayer
from fastenc.nn.layer import run_single_ops
from fastenc.nn.layer_spec import (
    AttentionInputs,
    CastWeights,
    LayerDropout,
    LayerSpec,
    LayerState,
    LayerWeights,
)

FUSED, CPU, SINGLE = "fused sublayers", "CPU inference", "single ops"


def run_layer(
    state: LayerState,
    inputs: AttentionInputs,
    weights: LayerWeights,
    spec: LayerSpec,
    dropout: LayerDropout,
    *,
    adaptation: LayerAdaptation | None = None,
    frozen: FrozenLayer | None = None,
    cast: CastWeights | None = None,
) -> LayerState:
    """Run one layer in the first way that can take the call: fused sublayers, CPU inference or single ops.

    Args:
        adaptation: what :mod:`fastenc.adapt` adds to the layer; it is computed with single ops only.
        frozen: packed or stacked copies of the weights (:func:`fastenc.freeze`).
        cast: copies of the weights in autocast's dtype (:func:`fastenc.nn.cast_weights.cast_weights`).
    Returns: the next layer's state.
    """
    if isinstance(frozen, LayerWeights):
        weights, frozen = frozen, None
    call = (state, inputs, weights, spec, dropout)
    if adaptation is not None:
        return run_single_ops(*call, adaptation)
    if fused_sublayers.unsupported_reason(*call) is None:
        return fused_sublayers.run_fused_sublayers(*call, cast)
    if cpu_inference.unsupported_reason(*call) is None:
        return cpu_inference.run_cpu_inference(*call, frozen)
    return run_single_ops(*call)


def unsupported_reasons(
    state: LayerState,
    inputs: AttentionInputs,
    weights: LayerWeights,
    spec: LayerSpec,
    dropout: LayerDropout,
    *,
    adaptation: LayerAdaptation | None = None,
) -> Mapping[str, str | None]:
    """{way of running the layer: why it cannot take the call, or None}, in the order in which they are tried."""
    call = (state, inputs, weights, spec, dropout)
    adapted = None if adaptation is None else "an adaptation is added to the layer"
    return {
        FUSED: adapted or fused_sublayers.unsupported_reason(*call),
        CPU: adapted or cpu_inference.unsupported_reason(*call),
        SINGLE: None,
    }
