"""The ways of running a layer, and which one a call takes."""

from collections.abc import Mapping

from fastenc.nn import fused_sublayers, packed_inference
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
from fastenc.nn.packed_inference import PackedWeights

FUSED, PACKED, SINGLE = "fused sublayers", "packed weights", "single ops"


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
    """One layer in the first way that can take the call: fused, on packed weights, or in single ops.

    Args:
        adaptation: what :mod:`fastenc.adapt` adds to the layer; single ops alone take it.
        frozen: the weights packed or stacked before (:func:`fastenc.freeze`).
        cast: the weights in autocast's dtype (:func:`fastenc.nn.cast_weights.cast_weights`).
    """
    if isinstance(frozen, LayerWeights):
        weights, frozen = frozen, None
    call = (state, inputs, weights, spec, dropout)
    if adaptation is not None:
        return run_single_ops(*call, adaptation)
    if fused_sublayers.unsupported_reason(*call) is None:
        return fused_sublayers.run_fused_sublayers(*call, cast)
    if packed_inference.unsupported_reason(*call, frozen) is None:
        return packed_inference.run_packed(*call, frozen)
    return run_single_ops(*call)


def unsupported_reasons(
    state: LayerState,
    inputs: AttentionInputs,
    weights: LayerWeights,
    spec: LayerSpec,
    dropout: LayerDropout,
    *,
    adaptation: LayerAdaptation | None = None,
    frozen: FrozenLayer | None = None,
) -> Mapping[str, str | None]:
    """Way → why it cannot take the call, or None, in the order in which they are tried."""
    call = (state, inputs, weights, spec, dropout)
    packed = frozen if isinstance(frozen, PackedWeights) else None
    adapted = None if adaptation is None else "an adaptation is added to the layer"
    return {
        FUSED: adapted or fused_sublayers.unsupported_reason(*call),
        PACKED: adapted or packed_inference.unsupported_reason(*call, packed),
        SINGLE: None,
    }
