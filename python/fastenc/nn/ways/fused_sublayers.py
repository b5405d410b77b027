"""The attention sublayers and the feed-forward sublayer, each as one node of the autograd graph.

With single ops, autograd adds the residual's gradient to the sublayer's gradient in a separate pass. In one node, the
matrix product that computes the sublayer's gradient accumulates into the residual's gradient. A node also saves only
the tensors that its gradients need. :mod:`fastenc.nn.layer` computes the same formulas with single ops.
"""

import torch
from torch import Tensor

from fastenc.nn.attend import project_positions
from fastenc.nn.global_attention import attend_from_globals
from fastenc.nn.layer import in_autocast_dtype
from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    CROSS_ATTENTION,
    DISENTANGLED,
    DROPOUTS,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    JOINT_HEAD_NORMS,
    KEY_BIAS,
    OUTPUT_TOKENS,
    OWN_NORMS,
    PLAIN_LAYERS,
    SORTED_QKV,
    LayerCall,
)
from fastenc.nn.layer_inputs import LayerState
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights, stack, stack_biases
from fastenc.nn.ways.fused_attention import FusedAttention, attention_op
from fastenc.nn.ways.fused_cross_attention import FusedCrossAttention
from fastenc.nn.ways.fused_feed_forward import FusedFeedForward
from fastenc.nn.ways.sublayer_end import mask_state
from fastenc.ops import checks, dispatch
from fastenc.ops.attention import WIDEST, triton_limit
from fastenc.ops.derivatives import in_forward_mode
from fastenc.packing import check_cu_seqlens

# The features of a call that these nodes compute.
TAKES = (
    PLAIN_LAYERS
    | SORTED_QKV
    | DROPOUTS
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | JOINT_HEAD_NORMS
    | OWN_NORMS
    | BLOCK_SPARSE
    | KEY_BIAS
    | OUTPUT_TOKENS
    | CROSS_ATTENTION
)


def unsupported_reason(layer_call: LayerCall) -> str | None:
    """Why the layer cannot run as fused autograd nodes, or None."""
    reason = mode_reason()
    if reason is not None:
        return reason
    x, inputs = layer_call.state.x, layer_call.inputs
    positions = inputs.relative_positions
    given = (x, layer_call.state.residual, inputs.relative_bias, *layer_call.weights.tensors())
    given += () if positions is None else (positions.embeddings,)
    given += () if inputs.source is None else (inputs.source.states,)
    if not any(tensor is not None and tensor.requires_grad for tensor in given):
        return "nothing requires a gradient"
    return _shape_reason(x, layer_call.spec, attention_op(inputs, layer_call.spec.attention))


def mode_reason() -> str | None:
    """Why no layer can run as fused autograd nodes in the current mode (gradients, transforms, tracing), or None."""
    if torch.compiler.is_compiling():
        return "torch.compile sees through single ops only"
    if not torch.is_grad_enabled():
        return "gradients are off"
    if torch._C._functorch.maybe_current_level() is not None:
        return "function transforms see through single ops only"
    if in_forward_mode():
        return "forward-mode differentiation sees through single ops only"
    return None


def _shape_reason(x: Tensor, spec: LayerSpec, op: str) -> str | None:
    """Why a layer of this description cannot run as fused autograd nodes, or None. op: that of its attention."""
    head_dim = spec.attention.head_dim
    widest = WIDEST if op == "attention" else dispatch.WIDEST_HEAD
    if head_dim % 16 or head_dim > widest:
        return f"head_dim must be a multiple of 16 up to {widest}, it is {head_dim}"
    if x.device.type != "cpu" and (reason := triton_limit(head_dim, x.dtype)):
        return reason
    if x.shape[-1] > 8192:
        return f"the hidden size must be at most 8192, it is {x.shape[-1]}"
    if dispatch.choose(op, "auto", x) == "reference":
        return f"there is no {op} kernel for {x.dtype} on {x.device.type}"
    return None


def run_fused_sublayers(layer_call: LayerCall) -> LayerState:
    """:func:`fastenc.nn.layer.run_single_ops`, each sublayer as one autograd node, and with the same dropout masks."""
    state = in_autocast_dtype(layer_call.state)
    weights = layer_call.plain_weights()
    h = _run_attention(state, weights, layer_call)
    if layer_call.spec.cross_norm is not None:
        h = _run_cross_attention(h, weights, layer_call)
    return _run_feed_forward(h.of_tokens(layer_call.inputs.output_tokens), weights, layer_call)


def _run_attention(state: LayerState, w: LayerWeights, layer_call: LayerCall) -> LayerState:
    x, inputs, spec, dropout = state.x, layer_call.inputs, layer_call.spec, layer_call.dropout
    checks.check_device("encoder_layer", "cu_seqlens", inputs.cu_seqlens, x)
    check_cu_seqlens(inputs.cu_seqlens, x.shape[0], inputs.max_seqlen)
    keys = queries = of_globals = None
    if spec.attention.position_terms:
        assert inputs.relative_positions is not None  # the stack makes them for every such layer
        tables = project_positions(
            inputs.relative_positions.embeddings, w, spec.attention, dropout.positions
        )
        keys, queries = (None if table is None else table.to(x.dtype) for table in tables)
    if inputs.global_tokens is not None:
        assert w.global_qkv is not None  # the stack gives global tokens to such layers only
        rng_state = mask_state(x, dropout.attention, dropout.rng_states[0])
        of_globals = attend_from_globals(
            x, inputs, w.global_qkv, spec.attention, dropout.attention, rng_state
        ).to(x.dtype)
    results = FusedAttention.apply(
        *_distinct(state),
        stack(w.qkv_weights),
        stack_biases(w.qkv_biases, w.qkv_weights),
        w.attention_out_weight,
        w.attention_out_bias,
        w.attention_norm_weight,
        w.attention_norm_bias,
        w.attention_own_norm_weight,
        inputs.relative_bias,
        keys,
        queries,
        w.query_norm_weight,
        w.key_norm_weight,
        of_globals,
        inputs._replace(relative_bias=None),
        spec.attention,
        (spec.attention_norm, spec.pre_norm),
        dropout,
        layer_call.prepared.cast,
    )
    return _state(results, spec)


def _run_cross_attention(state: LayerState, w: LayerWeights, layer_call: LayerCall) -> LayerState:
    spec, c, source = layer_call.spec, w.cross, layer_call.inputs.source
    assert c is not None and source is not None  # the stack gives both to every such layer
    check_cu_seqlens(source.cu_seqlens, source.states.shape[0], source.max_seqlen, "_k")
    results = FusedCrossAttention.apply(
        *_distinct(state),
        source.states.to(state.x.dtype),
        c.query_weight,
        c.query_bias,
        stack(c.key_value_weights),
        stack_biases(c.key_value_biases, c.key_value_weights),
        c.out_weight,
        c.out_bias,
        c.norm_weight,
        c.norm_bias,
        source,
        spec.attention,
        (spec.cross_norm, spec.pre_norm),
        layer_call.dropout,
        layer_call.prepared.cast,
    )
    return _state(results, spec)


def _run_feed_forward(state: LayerState, w: LayerWeights, layer_call: LayerCall) -> LayerState:
    spec = layer_call.spec
    results = FusedFeedForward.apply(
        *_distinct(state),
        stack(w.up_weights),
        stack_biases(w.up_biases, w.up_weights),
        w.down_weight,
        w.down_bias,
        w.out_norm_weight,
        w.out_norm_bias,
        w.down_own_norm_weight,
        spec.feed_forward,
        (spec.out_norm, spec.pre_norm),
        layer_call.dropout,
        layer_call.prepared.cast,
    )
    return _state(results, spec)


def _distinct(state: LayerState) -> tuple[Tensor, Tensor | None]:
    """(x, residual), the residual as None if both are one tensor, whose gradient is then computed once."""
    return state.x, None if state.residual is state.x else state.residual


def _state(results, spec: LayerSpec) -> LayerState:
    return LayerState(*results) if spec.pre_norm else LayerState(results, results)
