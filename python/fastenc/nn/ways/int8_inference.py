"""A layer without gradients on a CPU, in two ops whose matrix products are of operands in 8 bits.

The weights are those that ``fastenc.freeze(model, dtype="int8")`` has packed. Attention with its relative positions and
the projections of global tokens, norms, activations and residuals are not in 8 bits. A token's result does not depend
on the batch, its order or the number of threads.
"""

from functools import partial

import torch
from torch import Tensor

from fastenc.nn.features import given_fields, unknown_features
from fastenc.nn.layer_call import (
    FixedArguments,
    Int8Weights,
    LayerCall,
    PackedCross,
    PackedVectors,
    Store,
    unchanged,
)
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, rows_of
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_vectors import add_gated
from fastenc.nn.layer_weights import LayerWeights, stack_biases
from fastenc.nn.ways import cpu_attention, cpu_inference, cpu_weights
from fastenc.ops import activation, int8_products, library
from fastenc.packing import check_cu_seqlens

# The features of a call that these ops compute.
TAKES = cpu_inference.TAKES


def pack(weights: LayerWeights, spec: LayerSpec, store: Store = unchanged) -> Int8Weights:
    """The layer's weights in 8 bits; the two halves of a gated ``up`` apart."""
    w = weights
    packed = lambda *several: store(int8_products.pack_int8(*several))
    halves = [
        half for each in w.up_weights for half in each.split(spec.feed_forward.intermediate_size)
    ]
    v = w.layer_vectors
    return Int8Weights(
        packed(*w.qkv_weights),
        packed(w.attention_out_weight),
        packed(halves[0]),
        packed(halves[1]) if spec.feed_forward.gated else None,
        packed(w.down_weight),
        int8_products.attends_in_bfloat16(),
        cpu_weights.pack_cross(w.cross, packed),
        None if v is None else PackedVectors(packed(v.gate), packed(v.out)),
    )


def unsupported_reason(layer_call: LayerCall) -> str | None:
    """Why the layer cannot run in these two ops, or None.

    Raises: ValueError for a layer that has no other weights (``from_pretrained(..., dtype="int8")``).
    """
    if layer_call.prepared.int8 is None:
        return "its weights are not frozen in int8"
    reason = call_reason(layer_call)
    if not layer_call.weights.down_weight.is_meta:
        return reason
    reason = reason or unknown_features(layer_call.features(), TAKES)
    if reason is not None:
        raise ValueError(
            f'a model that was loaded with dtype="int8" cannot compute this call, because {reason}: call it on a CPU '
            "under torch.inference_mode(), without autocast and adaptations, or load it without dtype"
        )
    return None


def call_reason(layer_call: LayerCall) -> str | None:
    """Why a layer with weights in 8 bits cannot run on them in this call, or None."""
    if torch.compiler.is_compiling() and not layer_call.weights.down_weight.is_meta:
        return "torch.compile sees through single ops only"
    x = layer_call.state.x
    if (reason := cpu_inference.mode_reason(x)) is not None:
        return reason
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return f"its input must be float32 on the CPU, got {x.dtype} on {x.device.type}"
    return "it has an adaptation" if layer_call.adaptation is not None else None


def weights_reason(weights: LayerWeights, spec: LayerSpec) -> str | None:
    """Why the layer's weights cannot be packed in 8 bits, or its layer not run on them, or None."""
    if library.HAS_CPP and not int8_products.has_int8_products():
        return "int8 needs AVX2, and on a processor with AVX-512 also AVX512-VNNI, which this one lacks"
    reason = cpu_weights.weights_reason(weights, spec)
    if reason is not None:
        return reason
    if weights.down_weight.dtype != torch.float32:
        return f"int8 is made from float32 weights, they are {weights.down_weight.dtype}"
    return unknown_features(spec.features | given_fields(weights), TAKES)


def run_int8_inference(layer_call: LayerCall) -> LayerState:
    """:func:`fastenc.nn.layer.run_single_ops` without gradients, its products in 8 bits."""
    state = layer_call.state
    inputs = layer_call.inputs
    spec = layer_call.spec
    w = layer_call.weights
    a, packed = spec.attention, layer_call.prepared.int8
    assert packed is not None
    if not torch.compiler.is_compiling():
        check_cu_seqlens(inputs.cu_seqlens, state.x.shape[0], inputs.max_seqlen)
    fixed = layer_call.prepared.fixed or fixed_arguments(w, packed, spec)
    if cpu_attention.attends_separately(inputs, a, packed.bf16_attention):
        weight, bias, *_ = fixed.attention
        columns = sum(a.heads) * a.head_dim
        attended = cpu_attention.attend(
            int8_products.int8_linear(state.x, weight, bias, columns), layer_call
        )
    else:
        attended = attend(state.x, inputs, fixed.attention)
    residual = state.residual
    if packed.cross is not None:
        attended, residual = _attend_to_source(attended, layer_call, packed, packed.cross)
    attended, residual = (rows_of(each, inputs.output_tokens) for each in (attended, residual))
    end = after_attention(attended, residual, fixed.after_attention, spec.pre_norm)
    if inputs.layer_vectors is None or packed.vectors is None:
        return end
    sizes = (spec.layer_vector_size, residual.shape[1])
    products = (
        partial(int8_products.int8_linear, packed=weight, bias=None, columns=size)
        for weight, size in zip(packed.vectors, sizes, strict=True)
    )
    vectors = rows_of(inputs.layer_vectors, inputs.output_tokens)
    return add_gated(end.residual, vectors, w, spec, *products)


def _attend_to_source(
    attended: Tensor, layer_call: LayerCall, packed: Int8Weights, packed_cross: PackedCross
) -> tuple[Tensor, Tensor]:
    w, a = layer_call.weights, layer_call.spec.attention
    c, width = w.cross, a.num_heads * a.head_dim
    assert c is not None  # as packed_cross is not None
    linear = int8_products.int8_linear
    key_value_bias = stack_biases(c.key_value_biases, c.key_value_weights)
    products = cpu_attention.CrossProducts(
        lambda x: linear(x, packed.attention_out, None, w.attention_out_weight.shape[0]),
        lambda x: linear(x, packed_cross.query, c.query_bias, width),
        lambda states: linear(states, packed_cross.key_value, key_value_bias, 2 * width),
    )
    return cpu_attention.run_cross_attention(attended, layer_call, products)


def fixed_arguments(w: LayerWeights, packed: Int8Weights, spec: LayerSpec) -> FixedArguments:
    """The arguments of the two ops that follow from the layer alone."""
    out, norm = packed.attention_out, spec.attention_norm
    if packed.cross is not None and spec.cross_norm is not None:
        out, norm, w = packed.cross.out, spec.cross_norm, w.after_self_attention()
    return FixedArguments(
        (
            packed.qkv,
            stack_biases(w.qkv_biases, w.qkv_weights),
            *cpu_weights.attention_numbers(w, spec.attention),
            packed.bf16_attention,
        ),
        (
            out,
            w.attention_out_bias,
            w.attention_norm_weight,
            w.attention_norm_bias,
            packed.up,
            packed.gate,
            stack_biases(w.up_biases, w.up_weights),
            packed.down,
            w.down_bias,
            w.out_norm_weight,
            w.out_norm_bias,
            w.attention_own_norm_weight,
            w.down_own_norm_weight,
            spec.feed_forward.intermediate_size,
            activation.NUMBERS[spec.feed_forward.activation],
            spec.pre_norm,
            norm.norm_type == "rms",
            float(norm.eps),
            float(spec.out_norm.eps),
        ),
    )


def attend(x: Tensor, inputs: AttentionInputs, fixed: tuple) -> Tensor:
    """Attention of x: float32 (total_tokens, num_heads * head_dim). fixed: ``FixedArguments.attention``."""
    return torch.ops.fastenc.int8_layer_attention(
        x,
        inputs.cu_seqlens,
        inputs.max_seqlen,
        inputs.relative_bias,
        inputs.rotary,
        *fixed,
    )


def after_attention(attended: Tensor, residual: Tensor, fixed: tuple, pre_norm: bool) -> LayerState:
    """The layer's end. fixed: ``FixedArguments.after_attention``."""
    y, next_residual = torch.ops.fastenc.int8_layer_after_attention(attended, residual, *fixed)
    return LayerState(y, next_residual if pre_norm else y)
