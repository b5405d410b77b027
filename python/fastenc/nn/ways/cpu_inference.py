"""A layer without gradients on a CPU, in two ops, and a few more if it attends to a source.

With many rows, a block of rows stays in the cache from one matrix product to the next. The weights are packed in each
call, into memory that the thread reuses, so a changed weight is always seen. :func:`fastenc.freeze` packs them once, on
the user's promise that they do not change. With few rows, each weight is read once, and not packed unless it is frozen.
"""

import torch
from torch import Tensor

from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    DISENTANGLED,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    JOINT_HEAD_NORMS,
    KEY_BIAS,
    LAYER_VECTORS,
    OUTPUT_TOKENS,
    OWN_NORMS,
    PLAIN_LAYERS,
    SORTED_QKV,
    VALUE_NORMS,
    LayerCall,
)
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, rows_of
from fastenc.nn.layer_vectors import add_gated
from fastenc.nn.ways.cpu_attention import (
    attend,
    attends_separately,
    cross_products,
    product,
    project_qkv,
    run_cross_attention,
)
from fastenc.nn.ways.cpu_weights import (
    after_attention_arguments,
    attention_arguments,
    multiplies_pairs,
    packing_reason,
    weights_reason,
)
from fastenc.ops import (
    dispatch,
    encoder_layer,  # noqa: F401  (defines the ops of a layer)
    gemm,
)
from fastenc.ops.derivatives import in_forward_mode
from fastenc.packing import check_cu_seqlens

# With this many rows per thread, a thread computes all columns of its rows. With fewer, the threads share out the
# columns of each product, so that each weight is read by one thread only.
MIN_ROWS_PER_THREAD = 16
# Threads take whole sequences. Their work is even only if a thread has at least this many of the longest ones.
MIN_SEQUENCES_PER_THREAD = 4
# The features of a call that these ops compute.
TAKES = (
    PLAIN_LAYERS
    | SORTED_QKV
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | JOINT_HEAD_NORMS
    | VALUE_NORMS
    | OWN_NORMS
    | LAYER_VECTORS
    | BLOCK_SPARSE
    | KEY_BIAS
    | OUTPUT_TOKENS
    | {"cross_norm", "cross", "source", "cache"}
)


def unsupported_reason(layer_call: LayerCall) -> str | None:
    """Why the layer cannot run in these two ops, or None."""
    x, weights = layer_call.state.x, layer_call.weights
    if torch.compiler.is_compiling():
        return "torch.compile sees through single ops only"
    if (reason := mode_reason(x)) is not None:
        return reason
    # Frozen weights were asked before they were packed.
    reason = None if layer_call.prepared.packed else weights_reason(weights, layer_call.spec)
    if reason is None and not has_few_rows(x) and not multiplies_pairs(weights):
        reason = packing_reason(weights)
    if reason is not None:
        return reason
    if x.dtype != weights.down_weight.dtype or x.device.type != "cpu":
        dtype = weights.down_weight.dtype
        return f"its input must be {dtype} on the CPU like its weights, got {x.dtype} on {x.device.type}"
    return None


def mode_reason(x: Tensor) -> str | None:
    """Why no layer can run without gradients in the current mode (gradients, autocast), or None."""
    if torch.is_grad_enabled():
        return "gradients are on"
    if in_forward_mode():
        return "forward-mode differentiation is on"
    return "autocast is on" if dispatch.autocast_dtype(x.device.type) else None


def has_few_rows(x: Tensor) -> bool:
    return x.shape[0] <= max(gemm.FEW_ROWS, MIN_ROWS_PER_THREAD * torch.get_num_threads())


def shares_sequences(x: Tensor, max_seqlen: int) -> bool:
    """Whether the threads can share out whole sequences evenly."""
    threads = torch.get_num_threads()
    return threads == 1 or max_seqlen * MIN_SEQUENCES_PER_THREAD * threads <= x.shape[0]


def run_cpu_inference(layer_call: LayerCall) -> LayerState:
    """:func:`fastenc.nn.layer.run_single_ops` without gradients."""
    state, inputs, spec = layer_call.state, layer_call.inputs, layer_call.spec
    x, a, w = state.x, spec.attention, layer_call.plain_weights()
    packed, fixed = layer_call.prepared.packed, layer_call.prepared.fixed
    check_cu_seqlens(inputs.cu_seqlens, x.shape[0], inputs.max_seqlen)
    few_rows = has_few_rows(x)
    in_one_op = not attends_separately(inputs, a, multiplies_pairs(w))
    shared = few_rows or shares_sequences(x, inputs.max_seqlen)
    # Where a separate attention would round otherwise, threads that cannot share out the sequences share the columns.
    rounds = multiplies_pairs(w) or a.head_norm_eps is not None
    if in_one_op and (shared or rounds):
        given = attention_arguments(w, packed, a) if fixed is None else fixed.attention
        attended = attend_in_one_op(few_rows or not shared, x, inputs, given)
    else:
        # In float32 as in the one op, and as with packed weights, which bfloat16 has where it is emulated.
        widens = in_one_op or (x.dtype == torch.bfloat16 and gemm.emulates_bfloat16())
        attended = attend(project_qkv(x.float() if widens else x, w, spec, packed), layer_call)
    before = state.residual
    if spec.cross_norm is not None:
        attended, before = run_cross_attention(attended, layer_call, cross_products(w, packed))
    given = after_attention_arguments(w, packed, spec) if fixed is None else fixed.after_attention
    attended, before = (rows_of(each, inputs.output_tokens) for each in (attended, before))
    end = after_attention(attended, before, given, spec.pre_norm)
    return end if inputs.layer_vectors is None else _add_gated(end.residual, layer_call)


def _add_gated(s: Tensor, layer_call: LayerCall) -> LayerState:
    w, packed, inputs = layer_call.weights, layer_call.prepared.packed, layer_call.inputs
    v, of_vectors = w.layer_vectors, None if packed is None else packed.vectors
    assert v is not None and inputs.layer_vectors is not None  # the caller has seen them
    gate, out = (None, None) if of_vectors is None else of_vectors
    products = (
        lambda x: product(x, (v.gate,), (None,), gate).to(x.dtype),
        lambda x: product(x, (v.out,), (None,), out).to(x.dtype),
    )
    vectors = rows_of(inputs.layer_vectors, inputs.output_tokens)
    return add_gated(s, vectors, w, layer_call.spec, *products)


def attend_in_one_op(few_rows: bool, x: Tensor, inputs: AttentionInputs, fixed: tuple) -> Tensor:
    """Attention of x: (total_tokens, num_heads * head_dim).

    Args: few_rows: the threads share out the columns. fixed: by :func:`attention_arguments`.
    """
    return torch.ops.fastenc.encoder_layer_attention(
        x,
        inputs.cu_seqlens,
        inputs.max_seqlen,
        inputs.relative_bias,
        inputs.rotary,
        few_rows,
        *fixed,
    )


def after_attention(attended: Tensor, residual: Tensor, fixed: tuple, pre_norm: bool) -> LayerState:
    """The layer's end. fixed: by :func:`after_attention_arguments`."""
    y, next_residual = torch.ops.fastenc.encoder_layer_after_attention(
        attended, residual, has_few_rows(residual), *fixed
    )
    return LayerState(y, next_residual if pre_norm else y)
