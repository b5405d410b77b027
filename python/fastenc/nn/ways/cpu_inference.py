"""A layer without gradients on a CPU, in two ops, and a few more if it attends to a source.

With many rows, a block of rows stays in the cache from one matrix product to the next. The weights are packed in each
call, into memory that the thread reuses, so a changed weight is always seen. :func:`fastenc.freeze` packs them once, on
the user's promise that they do not change. With few rows, each weight is read once, and not packed unless it is frozen.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from fastenc.nn.attend import attend_to_cache, attend_to_source, normalise_heads, project_positions
from fastenc.nn.block_plan import plan_of
from fastenc.nn.features import given_fields
from fastenc.nn.global_attention import attend_globally
from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    DISENTANGLED,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    HEAD_NORMS,
    OWN_NORMS,
    FixedArguments,
    LayerCall,
    PackedCross,
    PackedWeights,
    ProjectedPositions,
)
from fastenc.nn.layer_inputs import AttentionInputs, LayerState
from fastenc.nn.layer_spec import AttentionSpec, LayerSpec
from fastenc.nn.layer_weights import LayerWeights, stack, stack_biases
from fastenc.nn.stacked_linear import stacked_linear
from fastenc.ops import (
    activation,
    block_sparse_attention,
    disentangled_attention,
    dispatch,
    encoder_layer,  # noqa: F401  (defines the ops of a layer)
    gemm,
    layer_norm,
    library,
    rms_norm,
)
from fastenc.ops import attention as attention_op
from fastenc.ops.attention import WIDEST
from fastenc.packing import check_cu_seqlens

# With this many rows per thread, a thread computes all columns of its rows. With fewer, the threads share out the
# columns of each product, so that each weight is read by one thread only.
MIN_ROWS_PER_THREAD = 16
# Threads take whole sequences. Their work is even only if a thread has at least this many of the longest ones.
MIN_SEQUENCES_PER_THREAD = 4


def pack(weights: LayerWeights) -> PackedWeights:
    w = weights
    return PackedWeights(
        gemm.pack_weight(*w.qkv_weights),
        gemm.pack_weight(w.attention_out_weight),
        gemm.pack_weight(*w.up_weights),
        gemm.pack_weight(w.down_weight),
        None
        if (c := w.cross) is None
        else PackedCross(
            gemm.pack_weight(c.query_weight),
            gemm.pack_weight(*c.key_value_weights),
            gemm.pack_weight(c.out_weight),
        ),
    )


def project(
    rows: Tensor | None, weights: LayerWeights, spec: LayerSpec
) -> ProjectedPositions | None:
    """The layer's projections of the rows of a table of relative positions; None if it reads none."""
    if rows is None or not spec.attention.position_terms:
        return None
    return ProjectedPositions(*project_positions(rows, weights, spec.attention))


# The features of a call that these ops compute.
TAKES = frozenset(
    {"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated", "interleaved"}
    | {"key_heads", "rotates_neighbours"}
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | HEAD_NORMS
    | OWN_NORMS
    | BLOCK_SPARSE
    | {"cross_norm", "cross", "source", "cache"}
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
)


def unsupported_reason(layer_call: LayerCall) -> str | None:
    """Why the layer cannot run in these two ops, or None."""
    x, weights = layer_call.state.x, layer_call.weights
    if torch.compiler.is_compiling():
        return "torch.compile sees through single ops only"
    if torch.is_grad_enabled():
        return "gradients are on"
    if dispatch.autocast_dtype(x.device.type):
        return "autocast is on"
    # Frozen weights were asked before they were packed.
    reason = None if layer_call.prepared.packed else weights_reason(weights, layer_call.spec)
    if reason is None and not has_few_rows(x) and not _multiplies_pairs(weights):
        reason = packing_reason(weights)
    if reason is not None:
        return reason
    if x.dtype != weights.down_weight.dtype or x.device.type != "cpu":
        dtype = weights.down_weight.dtype
        return f"its input must be {dtype} on the CPU like its weights, got {x.dtype} on {x.device.type}"
    return None


def packing_reason(weights: LayerWeights) -> str | None:
    """Why packing weights that these ops can take would not be faster, or None."""
    ours = gemm.emulates_bfloat16() or gemm.multiplies_pairs()
    if weights.down_weight.dtype == torch.bfloat16 and not ours:
        return "this processor multiplies bfloat16 faster than float32"
    return None


def _multiplies_pairs(weights: LayerWeights) -> bool:
    """Whether products are of pairs of bfloat16, with float32 sums."""
    return weights.down_weight.dtype == torch.bfloat16 and gemm.multiplies_pairs()


def has_few_rows(x: Tensor) -> bool:
    return x.shape[0] <= max(gemm.FEW_ROWS, MIN_ROWS_PER_THREAD * torch.get_num_threads())


def weights_reason(weights: LayerWeights, spec: LayerSpec) -> str | None:
    """Why these ops cannot take the layer's weights, for any input, or None."""
    weight = weights.down_weight
    if not library.HAS_CPP:
        return "the compiled extension is not available"
    if weight.device.type != "cpu":
        return f"it runs on CPUs only, the weights are on {weight.device.type}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 or bfloat16, the weights are {weight.dtype}"
    if not packed_is_faster():
        return "this processor has no AVX2"
    rows, columns = weight.shape
    if rows % 16 or columns % 16 or spec.attention.head_dim % 16:
        return (
            "widths must be multiples of 16, they are "
            f"{rows} (hidden), {columns} (inner) and {spec.attention.head_dim} (a head)"
        )
    a = spec.attention
    widest = 128 if a.position_terms or a.block_size or a.global_attention else WIDEST
    if spec.attention.head_dim > widest:
        return f"head_dim must be at most {widest}, it is {spec.attention.head_dim}"
    if len(spec.norm_types) > 1:
        types = " and ".join(map(repr, sorted(spec.norm_types)))
        return f"its norms must be of one type, they are {types}"
    matrices = (*weights.qkv_weights, weights.attention_out_weight, *weights.up_weights)
    if given_fields(weights):  # few families; every layer of every call asks
        matrices = tuple(tensor for tensor in weights.tensors() if tensor.dim() == 2)
    if any(matrix.dtype != weight.dtype for matrix in matrices):
        return "its weights must have one dtype, they have several"
    return None


def packed_is_faster() -> bool:
    return gemm.has_vectors()


def run_cpu_inference(layer_call: LayerCall) -> LayerState:
    """:func:`fastenc.nn.layer.run_single_ops` without gradients."""
    state, inputs, spec, packed = (
        layer_call.state,
        layer_call.inputs,
        layer_call.spec,
        layer_call.prepared.packed,
    )
    x, w, a = state.x, layer_call.prepared.stacked or layer_call.weights, spec.attention
    check_cu_seqlens(inputs.cu_seqlens, x.shape[0], inputs.max_seqlen)
    fixed = layer_call.prepared.fixed
    few_rows = has_few_rows(x)
    in_one_op = not attends_separately(inputs, a, _multiplies_pairs(w))
    shared = few_rows or shares_sequences(x, inputs.max_seqlen)
    # Where a separate attention would round otherwise, threads that cannot share out the sequences share the columns.
    rounds = _multiplies_pairs(w) or a.head_norm_eps is not None
    if in_one_op and (shared or rounds):
        given = attention_arguments(w, packed, a) if fixed is None else fixed.attention
        attended = attend_in_one_op(few_rows or not shared, x, inputs, given)
    else:
        # In float32 as in the one op, and as with packed weights, which bfloat16 has where it is emulated.
        widens = in_one_op or (x.dtype == torch.bfloat16 and gemm.emulates_bfloat16())
        attended = attend(_project(x.float() if widens else x, w, spec, packed), layer_call)
    before = state.residual
    if spec.cross_norm is not None:
        attended, before = _attend_to_source(attended, layer_call)
    given = after_attention_arguments(w, packed, spec) if fixed is None else fixed.after_attention
    return after_attention(few_rows, attended, before, given, spec.pre_norm)


def attends_separately(inputs: AttentionInputs, a: AttentionSpec, rounds_otherwise: bool) -> bool:
    """Whether the layer's attention is an op of its own, after the product with q, k and v.

    Args:
        rounds_otherwise: whether attention in that op rounds otherwise. Then a layer that needs another op for some
            batches takes it for all, so that a sequence's result does not depend on its batch.
    """
    needed_for_some = a.global_attention or bool(a.block_size)
    return (
        bool(a.position_terms)
        or a.sorts_qkv
        or inputs.cache is not None
        or inputs.global_tokens is not None
        or plan_of(inputs, a) is not None
        or (rounds_otherwise and needed_for_some)
    )


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


def after_attention(
    few_rows: bool, attended: Tensor, residual: Tensor, fixed: tuple, pre_norm: bool
) -> LayerState:
    """The layer's end. fixed: by :func:`after_attention_arguments`."""
    y, next_residual = torch.ops.fastenc.encoder_layer_after_attention(
        attended, residual, few_rows, *fixed
    )
    return LayerState(y, next_residual if pre_norm else y)


def fixed_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: LayerSpec
) -> FixedArguments:
    """The arguments of the two ops that follow from the layer alone."""
    return FixedArguments(
        attention_arguments(w, packed, spec.attention), after_attention_arguments(w, packed, spec)
    )


def attention_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: AttentionSpec
) -> tuple:
    return (
        [*w.qkv_weights] if packed is None else [packed.qkv],
        stack_biases(w.qkv_biases, w.qkv_weights),
        packed is not None,
        *attention_numbers(w, spec),
    )


def after_attention_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: LayerSpec
) -> tuple:
    out, norm = None if packed is None else packed.attention_out, spec.attention_norm
    if spec.cross_norm is not None:
        out = None if packed is None or packed.cross is None else packed.cross.out
        w, norm = w.after_self_attention(), spec.cross_norm
    f = spec.feed_forward
    return (
        [w.attention_out_weight if out is None else out],
        w.attention_out_bias,
        w.attention_norm_weight,
        w.attention_norm_bias,
        [*w.up_weights] if packed is None else [packed.up],
        stack_biases(w.up_biases, w.up_weights),
        [w.down_weight if packed is None else packed.down],
        w.down_bias,
        w.out_norm_weight,
        w.out_norm_bias,
        w.attention_own_norm_weight,
        w.down_own_norm_weight,
        packed is not None,
        f.intermediate_size,
        activation.NUMBERS[f.activation],
        f.gated,
        spec.pre_norm,
        norm.norm_type == "rms",
        float(norm.eps),
        float(spec.out_norm.eps),
    )


def attention_numbers(w: LayerWeights, spec: AttentionSpec) -> tuple:
    """Heads, scale, norms of heads and window: what follows the product in the ops of attention."""
    return (
        *spec.heads[:2],
        spec.head_dim,
        float(spec.scale),
        w.query_norm_weight,
        w.key_norm_weight,
        float(spec.head_norm_eps or 0),
        *spec.window,
    )


def _attend_to_source(attended: Tensor, layer_call: LayerCall) -> tuple[Tensor, Tensor]:
    """The end of self-attention, and attention to the source without the end of its sublayer.

    Returns: (total_tokens, num_heads * head_dim), and the residual for that end.
    """
    state, inputs, spec = layer_call.state, layer_call.inputs, layer_call.spec
    w = layer_call.prepared.stacked or layer_call.weights
    packed, c, source = layer_call.prepared.packed, w.cross, inputs.source
    of_cross = None if packed is None else packed.cross
    assert c is not None and source is not None  # the stack gives both to every such layer
    residual, dtype = state.residual, state.residual.dtype
    # The norm's kernel adds the bias.
    y = product(
        attended,
        (w.attention_out_weight,),
        (None,),
        None if packed is None else packed.attention_out,
    )
    function = (
        rms_norm
        if spec.attention_norm.norm_type == "rms"
        else partial(layer_norm, bias=w.attention_norm_bias)
    )
    h = function(
        y.to(dtype),
        w.attention_norm_weight,
        residual=residual,
        x_bias=w.attention_out_bias,
        eps=spec.attention_norm.eps,
        return_residual_sum=spec.pre_norm,
    )
    x, before = h if spec.pre_norm else (h, h)
    query, key_value = (None, None) if of_cross is None else of_cross[:2]
    queries = product(x, (c.query_weight,), (c.query_bias,), query)
    keys_values = lambda: product(source.states, c.key_value_weights, c.key_value_biases, key_value)
    return attend_to_source(queries, keys_values, inputs, spec.attention).float(), before


def product(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    packed: Tensor | None,
) -> Tensor:
    """x W^T + b for stacked weights and biases.

    Returns: in pairs of bfloat16 the weights' dtype, packed or not. Else float32 with packed weights, and without the
        weights' dtype.
    """
    bias, dtype = stack_biases(biases, weights), weights[0].dtype
    pairs = dtype == torch.bfloat16 and gemm.multiplies_pairs()
    if pairs:
        x = x.to(dtype)
    if packed is None:
        return torch.ops.fastenc.gemm(x, stack(weights).t(), bias)
    rows = sum(weight.shape[0] for weight in weights)
    x = x if x.dtype == packed.dtype else x.float()
    y = gemm.gemm_packed(x, packed, None if bias is None else bias.float(), rows)
    return y.to(dtype) if pairs else y


def shares_sequences(x: Tensor, max_seqlen: int) -> bool:
    """Whether the threads can share out whole sequences evenly."""
    threads = torch.get_num_threads()
    return threads == 1 or max_seqlen * MIN_SEQUENCES_PER_THREAD * threads <= x.shape[0]


def _project(x: Tensor, w: LayerWeights, spec: LayerSpec, packed: PackedWeights | None) -> Tensor:
    """The product with q, k and v."""
    plain = packed is None and spec.attention.position_terms and x.dtype == w.qkv_weights[0].dtype
    if plain and (not _multiplies_pairs(w) or x.shape[0] <= gemm.FEW_ROWS):
        return stacked_linear(x, w.qkv_weights, w.qkv_biases, gemm.linear_in_one_order)
    return product(x, w.qkv_weights, w.qkv_biases, None if packed is None else packed.qkv)


def attend(qkv: Tensor, layer_call: LayerCall) -> Tensor:
    """Attention of the product with q, k and v: float32 (total_tokens, num_heads * head_dim)."""
    inputs, a = layer_call.inputs, layer_call.spec.attention
    if a.position_terms:
        assert inputs.relative_positions is not None  # the stack makes them for every such layer
        embeddings, slots, first = inputs.relative_positions
        tables: Iterable[Tensor | None]
        if (once := layer_call.prepared.positions) is not None:
            rows = slice(first, first + embeddings.shape[0])
            tables = (None if table is None else table[rows] for table in once)
        else:
            weights = layer_call.prepared.stacked or layer_call.weights
            tables = project_positions(embeddings, weights, a)
        keys, queries = (None if each is None else each.to(qkv.dtype) for each in tables)
        attended = disentangled_attention(
            a.split_qkv(qkv),
            inputs.cu_seqlens,
            inputs.max_seqlen,
            slots,
            position_keys=keys,
            position_queries=queries,
            softmax_scale=a.scale,
        )
    elif inputs.global_tokens is not None:
        weights = layer_call.prepared.stacked or layer_call.weights
        attended = attend_globally(layer_call.state.x, a.split_qkv(qkv), inputs, weights, a)
    elif inputs.cache is not None:
        both = a.split_qkv(qkv)
        attended = attend_to_cache(both[:, 0], both[:, 1:], inputs, inputs.cache, a)
    elif (plan := plan_of(inputs, a)) is not None:
        attended = block_sparse_attention(
            a.split_qkv(qkv),
            inputs.cu_seqlens,
            inputs.max_seqlen,
            plan,
            a.block_size,
            softmax_scale=a.scale,
        )
    else:
        heads = a.split_qkv(qkv)
        if a.head_norm_eps is not None:
            weights = layer_call.prepared.stacked or layer_call.weights
            heads = normalise_heads(heads, weights, a)
        attended = attention_op(
            heads,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            softmax_scale=a.scale,
            window_size=a.window,
            relative_bias=inputs.relative_bias,
            rotary=inputs.rotary,
            num_key_heads=a.key_heads or None,
        )
    return attended.flatten(1).float()
