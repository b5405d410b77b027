"""The attention sublayers and the feed-forward sublayer, each as one node of the autograd graph.

With single ops, autograd adds the residual's gradient to the sublayer's gradient in a separate pass. In one node, the
matrix product that computes the sublayer's gradient accumulates into the residual's gradient. A node also saves only
the tensors that its gradients need. :mod:`fastenc.nn.layer` computes the same formulas with single ops.
"""

import torch
from torch import Tensor

from fastenc.nn.block_plan import plan_of
from fastenc.nn.global_attention import attend_from_globals, local_arguments
from fastenc.nn.layer import drop, in_autocast_dtype, project_positions
from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    CROSS_ATTENTION,
    DISENTANGLED,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    HEAD_NORMS,
    OWN_NORMS,
    LayerCall,
)
from fastenc.nn.layer_spec import (
    AttentionInputs,
    AttentionSpec,
    CastWeights,
    FeedForwardSpec,
    LayerDropout,
    LayerSpec,
    LayerState,
    NormSpec,
    Source,
    stack,
    stack_biases,
)
from fastenc.ops import activation, checks, dispatch
from fastenc.ops.attention import TENSORS, WIDEST, self_attention_call, triton_limit
from fastenc.ops.column_sum import column_sum
from fastenc.ops.gemm import gemm
from fastenc.ops.linear_gelu import in_epilogue
from fastenc.packing import check_cu_seqlens

WIDEST_OTHERS = 128  # the widest heads of the kernels of other attentions than the plain one
# The features of a call that these nodes compute.
TAKES = frozenset(
    {"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated", "interleaved"}
    | {"key_heads", "rotates_neighbours"}
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | HEAD_NORMS
    | OWN_NORMS
    | BLOCK_SPARSE
    | CROSS_ATTENTION
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
    | {f"{name}_dropout" for name in ("attention", "attention_out", "inner", "down", "positions")}
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
    op = "disentangled_attention" if layer_call.spec.attention.position_terms else "attention"
    if inputs.block_plan is not None:
        op = "block_sparse_attention"
    if inputs.global_tokens is not None:
        op = "global_window_attention"
    return shape_reason(x, layer_call.spec, op)


def mode_reason() -> str | None:
    """Why no layer can run as fused autograd nodes in the current mode (gradients, transforms, tracing), or None."""
    if torch.compiler.is_compiling():
        return "torch.compile sees through single ops only"
    if not torch.is_grad_enabled():
        return "gradients are off"
    if torch._C._functorch.maybe_current_level() is not None:
        return "function transforms see through single ops only"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation sees through single ops only"
    return None


def shape_reason(x: Tensor, spec: LayerSpec, op: str) -> str | None:
    """Why a layer of this description cannot run as fused autograd nodes, or None. op: the name of its attention's."""
    head_dim = spec.attention.head_dim
    widest = WIDEST if op == "attention" else WIDEST_OTHERS
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
    """:func:`fastenc.nn.layer.run_single_ops` with two autograd nodes, and with the same dropout masks."""
    state, inputs, spec, dropout = (
        in_autocast_dtype(layer_call.state),
        layer_call.inputs,
        layer_call.spec,
        layer_call.dropout,
    )
    x, w, cast = (
        state.x,
        layer_call.prepared.stacked or layer_call.weights,
        layer_call.prepared.cast,
    )
    checks.check_device("encoder_layer", "cu_seqlens", inputs.cu_seqlens, x)
    check_cu_seqlens(inputs.cu_seqlens, x.shape[0], inputs.max_seqlen)
    keys = queries = None
    if spec.attention.position_terms:
        assert inputs.relative_positions is not None  # the stack makes them for every such layer
        tables = project_positions(
            inputs.relative_positions.embeddings, w, spec.attention, dropout.positions
        )
        keys, queries = (None if table is None else table.to(x.dtype) for table in tables)
    of_globals = None
    if inputs.global_tokens is not None:
        assert w.global_qkv is not None  # the stack gives global tokens to such layers only
        rng_state, dropout_p = _mask(x, dropout.attention, dropout.rng_states[0])
        of_globals = attend_from_globals(
            x, inputs, w.global_qkv, spec.attention, dropout_p, rng_state
        ).to(x.dtype)
    h = _Attention.apply(
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
        cast,
    )
    h = _state(h, spec)
    if spec.cross_norm is not None:
        assert (
            w.cross is not None and inputs.source is not None
        )  # the stack gives both to every such layer
        c, source = w.cross, inputs.source
        check_cu_seqlens(source.cu_seqlens, source.states.shape[0], source.max_seqlen, "_k")
        h = _CrossAttention.apply(
            *_distinct(h),
            source.states.to(h.x.dtype),
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
            dropout,
            cast,
        )
        h = _state(h, spec)
    y = _FeedForward.apply(
        *_distinct(h),
        stack(w.up_weights),
        stack_biases(w.up_biases, w.up_weights),
        w.down_weight,
        w.down_bias,
        w.out_norm_weight,
        w.out_norm_bias,
        w.down_own_norm_weight,
        spec.feed_forward,
        (spec.out_norm, spec.pre_norm),
        dropout,
        cast,
    )
    return _state(y, spec)


def _distinct(state: LayerState) -> tuple[Tensor, Tensor | None]:
    """(x, residual), the residual as None if both are one tensor, whose gradient is then computed once."""
    return state.x, None if state.residual is state.x else state.residual


def _state(results, spec: LayerSpec) -> LayerState:
    return LayerState(*results) if spec.pre_norm else LayerState(results, results)


def _mask(x: Tensor, dropout_p: float, state: Tensor | None) -> tuple[Tensor | None, float]:
    """(seed and offset of the dropout mask or None without dropout, probability)."""
    checks.check_dropout("encoder_layer", dropout_p)
    return checks.mask_rng_state("encoder_layer", state, dropout_p, x), dropout_p


def _attention_arguments(
    inputs: AttentionInputs,
    relative_bias: Tensor | None,
    spec: AttentionSpec,
    rng_state: Tensor | None,
    dropout_p: float,
) -> tuple[tuple[Tensor | None, ...], tuple]:
    """The arguments of plain attention after q, k and v: the tensors, and the numbers."""
    all_blocks, long_blocks = inputs.blocks or (None, None)
    attention_call = self_attention_call(
        inputs.cu_seqlens,
        inputs.max_seqlen,
        scale=spec.scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
        relative_bias=None if relative_bias is None else relative_bias.float(),
        rotary=inputs.rotary,
        bounds=inputs.bounds,
        all_blocks=all_blocks,
        long_blocks=long_blocks,
        window_left=spec.window[0],
        window_right=spec.window[1],
    )
    return attention_call.tensors(), attention_call[TENSORS:]


class _Attention(torch.autograd.Function):
    """Norm(residual + dropout(OwnNorm(Attention(x) W_out + b_out))), and with pre-norm also the sum inside the norm.

    Weights are cast to x's dtype (autocast). Gradients have the dtypes of the weights.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        own_norm_weight: Tensor | None,
        relative_bias: Tensor | None,
        position_keys: Tensor | None,
        position_queries: Tensor | None,
        query_norm_weight: Tensor | None,
        key_norm_weight: Tensor | None,
        of_globals: Tensor | None,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        norm: tuple[NormSpec, bool],
        dropout: LayerDropout,
        cast: CastWeights | None,
    ):
        needs = ctx.needs_input_grad
        needs_x, needs_qkv, needs_qkv_bias, needs_out = needs[0], needs[2], needs[3], needs[4]
        needs_attention = needs_x or needs_qkv or needs_qkv_bias or any(needs[9:15])
        ctx.dtypes = _dtypes(
            qkv_weight, qkv_bias, out_weight, out_bias, norm_weight, norm_bias, own_norm_weight
        )
        ctx.spec, head_norms = spec, (query_norm_weight, key_norm_weight)
        ctx.head_norm_dtypes = _dtypes(*head_norms)
        if cast is not None:
            qkv_weight, qkv_bias, out_weight = (
                cast.qkv_weight,
                cast.qkv_bias,
                cast.attention_out_weight,
            )
        qkv_weight, out_weight = qkv_weight.to(x.dtype), out_weight.to(x.dtype)
        qkv = gemm(x, qkv_weight.t(), None if qkv_bias is None else qkv_bias.to(x.dtype))
        qkv = spec.split_qkv(qkv)
        plan = plan_of(inputs, spec)
        # Block-sparse attention has no dropout of the weights, as in transformers.
        dropped = 0.0 if plan is not None else dropout.attention
        rng_state, dropout_p = _mask(x, dropped, dropout.rng_states[0])
        ctx.bias_dtype = None if relative_bias is None else relative_bias.dtype
        ctx.is_sparse, ctx.has_globals = plan is not None, of_globals is not None
        tensors: tuple[Tensor | None, ...]
        numbers: tuple
        if spec.position_terms:
            assert inputs.relative_positions is not None  # run_fused_sublayers has read them
            tensors = (position_keys, position_queries, inputs.relative_positions.slots)
            tensors = (*tensors, inputs.cu_seqlens, rng_state)
            numbers = (inputs.max_seqlen, dropout_p, spec.scale)
            attend = torch.ops.fastenc.disentangled_attention_fwd
        elif plan is not None:
            tensors = (*plan, inputs.cu_seqlens)
            numbers = (inputs.max_seqlen, spec.block_size, spec.scale)
            attend = torch.ops.fastenc.block_sparse_attention_fwd
        elif of_globals is not None:
            tensors, numbers = local_arguments(inputs, spec, dropout_p, rng_state)
            attend = torch.ops.fastenc.global_window_attention_fwd
        else:
            tensors, numbers = _attention_arguments(
                inputs, relative_bias, spec, rng_state, dropout_p
            )
            attend = torch.ops.fastenc.attention_fwd
        q, k, v = spec.parts(qkv)
        if spec.head_norm_eps is not None:
            (q, _), (k, _) = _normalised_heads((q, k), head_norms, spec.head_norm_eps)
        attended, lse = attend(q, k, v, *tensors, *numbers)
        if of_globals is not None:
            attended.index_copy_(0, inputs.global_tokens, of_globals)
        projected = gemm(attended.flatten(1), out_weight.t())
        out_dropout = _mask(x, dropout.attention_out, dropout.rng_states[1])
        ctx.norm, ctx.dropout_p = norm, out_dropout[1]
        results, saved = _norm_forward(
            projected, x if residual is None else residual, out_bias, norm_weight, norm_bias,
            own_norm_weight, norm, out_dropout,
        )  # fmt: skip
        ctx.one_input = residual is None
        ctx.save_for_backward(
            x if needs_qkv else None,
            qkv_weight if needs_x else None,
            out_weight if needs_attention else None,
            qkv if needs_attention else None,
            attended if needs_out or needs_attention else None,
            lse if needs_attention else None,
            *head_norms,
            *(tensors if needs_attention else ()),
            *saved,
        )
        ctx.tensors, ctx.numbers = len(tensors) if needs_attention else 0, numbers
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, qkv_weight, out_weight, qkv, attended, lse, *rest = ctx.saved_tensors
        head_norms, rest = rest[:2], rest[2:]
        spec = ctx.spec
        dhead_norms: tuple[Tensor | None, Tensor | None] = (None, None)
        tensors, saved = rest[: ctx.tensors], rest[ctx.tensors :]
        needs = ctx.needs_input_grad
        needs_x, needs_qkv, needs_qkv_bias, needs_out = needs[0], needs[2], needs[3], needs[4]
        needs_relative_bias = needs[9]
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dnorm = _norm_backward(dy, dsum, saved, ctx, needs[5:9])
            dx = dqkv_weight = dqkv_bias = dout_weight = drelative_bias = None
            dkeys = dqueries = dof_globals = None
            if needs_out:
                dout_weight = gemm(dprojected.t(), attended.flatten(1), dtype=ctx.dtypes[2])
            if needs_x or needs_qkv or needs_qkv_bias or any(needs[9:15]):
                dattended = gemm(dprojected, out_weight).view(attended.shape)
                q, k, v = spec.parts(qkv)
                if spec.head_norm_eps is not None:
                    # Computed again, so that the forward need not keep them.
                    (q, of_q), (k, of_k) = _normalised_heads((q, k), head_norms, spec.head_norm_eps)
                arguments = (q, k, v, *tensors, *ctx.numbers)
                if spec.position_terms:
                    backward = torch.ops.fastenc.disentangled_attention_bwd
                    dqkv, dkeys, dqueries, dbias = backward(
                        dattended, attended, lse, *arguments, needs_qkv_bias
                    )
                elif ctx.has_globals:
                    dqkv, dbias = torch.ops.fastenc.global_window_attention_bwd(
                        dattended, attended, lse, *arguments, needs_qkv_bias
                    )
                    dof_globals = dattended[tensors[0]]
                elif ctx.is_sparse:
                    dqkv, dbias = torch.ops.fastenc.block_sparse_attention_bwd(
                        dattended, attended, lse, *arguments, needs_qkv_bias
                    )
                else:
                    dqkv, _, _, drelative_bias, dbias = torch.ops.fastenc.attention_bwd(
                        dattended, None, attended, lse, *arguments, True, needs_relative_bias,
                        needs_qkv_bias and spec.head_norm_eps is None,
                    )  # fmt: skip
                dqkv = dqkv.view(qkv.shape)
                if spec.head_norm_eps is not None:
                    dhead_norms = _head_norms_backward(spec.parts(dqkv), (of_q, of_k), needs[12:14])
                    dbias = column_sum(dqkv.flatten(1)) if needs_qkv_bias else None
                dqkv = spec.join_qkv(dqkv)
                if needs_qkv:
                    dqkv_weight = gemm(dqkv.t(), x, dtype=ctx.dtypes[0])
                if needs_qkv_bias:
                    dqkv_bias = spec.join_qkv(dbias.view(1, *qkv.shape[1:]))[0]
                if needs_x and ctx.one_input:
                    dx = gemm(dqkv, qkv_weight, added=dresidual)
                elif needs_x:
                    dx = gemm(dqkv, qkv_weight)
        weights = _cast((dqkv_weight, dqkv_bias, dout_weight, *dnorm), ctx.dtypes)
        if not needs_relative_bias:
            drelative_bias = None
        (drelative_bias,) = _cast((drelative_bias,), (ctx.bias_dtype,))
        dkeys, dqueries = dkeys if needs[10] else None, dqueries if needs[11] else None
        others = drelative_bias, dkeys, dqueries, *_cast(dhead_norms, ctx.head_norm_dtypes)
        others = *others, dof_globals
        return dx, dresidual if needs[1] else None, *weights, *others, *(None,) * 5


def _normalised_heads(heads, weights, eps: float):
    """For queries and keys (total_tokens, heads, head_dim): their RMSNorm, and (input, mean, rstd, weight)."""
    results = []
    for x, weight in zip(heads, weights, strict=True):
        x = x.contiguous()
        y, _, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
            x, None, None, weight, None, None, 0.0, eps, True, True
        )
        results.append((y, (x, mean, rstd, weight)))
    return results


def _head_norms_backward(dheads, saved, needs) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the two weights; the gradients of queries and keys are changed in place to those before it."""
    dweights = []
    for dy, of_norm, needed in zip(dheads, saved, needs, strict=False):
        dx, _, dweight, _, _ = torch.ops.fastenc.layer_norm_bwd(
            dy.contiguous(), None, *of_norm, None, 0.0, True, needed, False
        )
        dy.copy_(dx)
        dweights.append(dweight if needed else None)
    return dweights[0], dweights[1]


class _CrossAttention(torch.autograd.Function):
    """Norm(residual + dropout(Attention(x, states) W_out + b_out)), and with pre-norm also the sum.

    Other arguments as in :class:`_Attention`.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        states: Tensor,
        query_weight: Tensor,
        query_bias: Tensor | None,
        key_value_weight: Tensor,
        key_value_bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        source: Source,
        spec: AttentionSpec,
        norm: tuple[NormSpec, bool],
        dropout: LayerDropout,
        cast: CastWeights | None,
    ):
        ctx.dtypes = _dtypes(
            query_weight, query_bias, key_value_weight, key_value_bias, out_weight, out_bias, norm_weight, norm_bias,
        )  # fmt: skip
        if cast is not None and cast.cross is not None:
            query_weight, key_value_weight, out_weight = cast.cross
        query_weight, key_value_weight, out_weight = (
            weight.to(x.dtype) for weight in (query_weight, key_value_weight, out_weight)
        )
        shape = (-1, spec.num_heads, spec.head_dim)
        project = lambda rows, weight, bias: gemm(
            rows, weight.t(), None if bias is None else bias.to(rows.dtype)
        )
        q = project(x, query_weight, query_bias).view(shape)
        kv = project(states, key_value_weight, key_value_bias).view(-1, 2, *shape[1:])
        rng_state, dropout_p = _mask(x, dropout.cross, dropout.rng_states[3])
        attention_call = self_attention_call(
            source.cu_targets,
            source.max_targets,
            scale=spec.scale,
            dropout_p=dropout_p,
            rng_state=rng_state,
            cu_seqlens_k=source.cu_seqlens,
            max_seqlen_k=source.max_seqlen,
        )
        attended, lse = torch.ops.fastenc.attention_fwd(q, *kv.unbind(1), *attention_call)
        projected = gemm(attended.flatten(1), out_weight.t())
        out_dropout = _mask(x, dropout.cross_out, dropout.rng_states[4])
        ctx.norm, ctx.dropout_p = norm, out_dropout[1]
        results, saved = _norm_forward(
            projected, x if residual is None else residual, out_bias, norm_weight, norm_bias,
            None, norm, out_dropout,
        )  # fmt: skip
        ctx.one_input, ctx.numbers = residual is None, attention_call[TENSORS:]
        ctx.save_for_backward(
            x, states, query_weight, key_value_weight, out_weight, q, kv, attended, lse,
            *attention_call.tensors(), *saved,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, states, query_weight, key_value_weight, out_weight, q, kv, attended, lse, *rest = (
            ctx.saved_tensors
        )
        tensors, saved = rest[:TENSORS], rest[TENSORS:]
        needs = ctx.needs_input_grad
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dnorm = _norm_backward(
                dy, dsum, saved, ctx, (*needs[8:11], False)
            )
            dx = dstates = dquery_weight = dkey_value_weight = dout_weight = None
            if needs[7]:
                dout_weight = gemm(dprojected.t(), attended.flatten(1), dtype=ctx.dtypes[4])
            dattended = gemm(dprojected, out_weight).view(q.shape)
            dq, dk, dv, _, _ = torch.ops.fastenc.attention_bwd(
                dattended, None, attended, lse, q, *kv.unbind(1), *tensors, *ctx.numbers, False, False, False,
            )  # fmt: skip
            dq, dkv = dq.flatten(1), torch.cat([dk.flatten(1), dv.flatten(1)], 1)
            if needs[3]:
                dquery_weight = gemm(dq.t(), x, dtype=ctx.dtypes[0])
            if needs[5]:
                dkey_value_weight = gemm(dkv.t(), states, dtype=ctx.dtypes[2])
            if needs[2]:
                dstates = gemm(dkv, key_value_weight)
            dquery_bias = column_sum(dq) if needs[4] else None
            dkey_value_bias = column_sum(dkv) if needs[6] else None
            if needs[0]:
                dx = gemm(dq, query_weight, added=dresidual if ctx.one_input else None)
        weights = _cast(
            (dquery_weight, dquery_bias, dkey_value_weight, dkey_value_bias, dout_weight, *dnorm[:3]), ctx.dtypes,
        )  # fmt: skip
        return dx, dresidual if needs[1] else None, dstates, *weights, *(None,) * 5


class _FeedForward(torch.autograd.Function):
    """Norm(residual + dropout(OwnNorm(FFN(x)))), and with pre-norm also the sum; arguments as in _Attention."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        residual: Tensor | None,
        up_weight: Tensor,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        own_norm_weight: Tensor | None,
        spec: FeedForwardSpec,
        norm: tuple[NormSpec, bool],
        dropout: LayerDropout,
        cast: CastWeights | None,
    ):
        needs = ctx.needs_input_grad
        needs_x, needs_up, needs_up_bias, needs_down = needs[0], needs[2], needs[3], needs[4]
        needs_inner = needs_x or needs_up or needs_up_bias
        ctx.dtypes = _dtypes(
            up_weight, up_bias, down_weight, down_bias, norm_weight, norm_bias, own_norm_weight
        )
        if cast is not None:
            up_weight, down_weight = cast.up_weight, cast.down_weight
        up_weight, down_weight = up_weight.to(x.dtype), down_weight.to(x.dtype)
        # What linear_gelu computes: erf-GELU of a product with a bias.
        is_linear_gelu = not spec.gated and spec.activation == "gelu" and not dropout.inner
        ctx.in_epilogue = False
        if up_bias is not None and is_linear_gelu and in_epilogue(x):
            ctx.in_epilogue, mask = True, None
            inner, up = torch.ops.fastenc.linear_gelu_fwd(x, up_weight, up_bias.to(x.dtype))
        else:
            up = gemm(x, up_weight.t())
            checks.check_vector("encoder_layer", "up_bias", up_bias, up)
            inner, mask = drop(_activate(up, up_bias, spec), dropout.inner)
        projected = gemm(inner, down_weight.t())
        ctx.spec, ctx.inner_dropout_p = spec, dropout.inner
        down_dropout = _mask(x, dropout.down, dropout.rng_states[2])
        ctx.norm, ctx.dropout_p = norm, down_dropout[1]
        results, saved = _norm_forward(
            projected, x if residual is None else residual, down_bias, norm_weight, norm_bias,
            own_norm_weight, norm, down_dropout,
        )  # fmt: skip
        ctx.one_input = residual is None
        # On a CPU this pass takes little time beside the products, and the tensor is among the widest of the layer.
        activates_again = needs_inner and mask is None and not ctx.in_epilogue and x.is_cpu
        ctx.save_for_backward(
            x if needs_up else None,
            up_weight if needs_x else None,
            down_weight if needs_inner else None,
            up if needs_inner else None,
            up_bias if needs_inner else None,
            inner if needs_down and not activates_again else None,
            mask if needs_inner else None,
            *saved,
        )
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, up_weight, down_weight, up, up_bias, inner, mask, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        needs_x, needs_up, needs_up_bias, needs_down = needs[0], needs[2], needs[3], needs[4]
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dnorm = _norm_backward(dy, dsum, saved, ctx, needs[5:9])
            dx = dup_weight = dup_bias = ddown_weight = None
            if needs_down:
                inner = _activate(up, up_bias, ctx.spec) if inner is None else inner
                ddown_weight = gemm(dprojected.t(), inner, dtype=ctx.dtypes[2])
                del inner
            if needs_x or needs_up or needs_up_bias:
                if ctx.in_epilogue:
                    dup, dup_bias = torch.ops.fastenc.linear_gelu_bwd(dprojected, down_weight, up)
                else:
                    dinner = gemm(dprojected, down_weight)
                    if mask is not None:
                        scale = 1 / (1 - ctx.inner_dropout_p)
                        dinner = torch.ops.aten.native_dropout_backward(dinner, mask, scale)
                    dup, dup_bias = _activate_backward(dinner, up, up_bias, ctx.spec)
                if needs_up:
                    dup_weight = gemm(dup.t(), x, dtype=ctx.dtypes[0])
                if needs_x and ctx.one_input:
                    dx = gemm(dup, up_weight, added=dresidual)
                elif needs_x:
                    dx = gemm(dup, up_weight)
        dup_bias = dup_bias if needs_up_bias else None
        weights = _cast((dup_weight, dup_bias, ddown_weight, *dnorm), ctx.dtypes)
        return dx, dresidual if needs[1] else None, *weights, *(None,) * 4


def _activate(up: Tensor, bias: Tensor | None, spec: FeedForwardSpec) -> Tensor:
    if spec.gated and spec.activation in activation.GATED:
        number = activation.NUMBERS[spec.activation]
        return torch.ops.fastenc.bias_glu_fwd(up, bias, number)
    if not spec.gated and spec.activation in ("gelu", "gelu_tanh"):
        return torch.ops.fastenc.bias_gelu_fwd(up, bias, spec.activation == "gelu_tanh")
    return _formula(up if bias is None else up + bias.to(up.dtype), spec)


def _activate_backward(
    dinner: Tensor, up: Tensor, bias: Tensor | None, spec: FeedForwardSpec
) -> tuple[Tensor, Tensor | None]:
    if spec.gated and spec.activation in activation.GATED:
        number = activation.NUMBERS[spec.activation]
        return torch.ops.fastenc.bias_glu_bwd(dinner, up, bias, number)
    if not spec.gated and spec.activation in ("gelu", "gelu_tanh"):
        return torch.ops.fastenc.bias_gelu_bwd(dinner, up, bias, spec.activation == "gelu_tanh")
    with torch.enable_grad():
        biased = (up if bias is None else up + bias.to(up.dtype)).detach().requires_grad_()
        (dup,) = torch.autograd.grad(_formula(biased, spec), biased, dinner)
    return dup, None if bias is None else column_sum(dup)


def _formula(biased: Tensor, spec: FeedForwardSpec) -> Tensor:
    """act(biased) for activations without a fused kernel, in torch's ops; gated: relu(first half) * second half."""
    if spec.gated:
        activated, gate = biased.chunk(2, -1)
        return activated.relu() * gate
    return torch.nn.functional.silu(biased) if spec.activation == "silu" else biased.relu()


def _norm_forward(projected, residual, x_bias, weight, bias, own_weight, norm, dropout):
    """(y or with pre-norm (y, sum), tensors that the backward needs)."""
    spec, pre_norm = norm
    own: tuple[Tensor | None, ...] = (None,) * 4
    if own_weight is not None:
        x, changed = projected, x_bias is not None
        projected, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
            x, None, x_bias, own_weight, None, None, 0.0, spec.eps, spec.norm_type == "rms", True
        )
        own, x_bias = (h if changed else x, mean, rstd, own_weight), None
    checks.check_like("encoder_layer", "residual", residual, projected)
    for name, value in (("x_bias", x_bias), ("weight", weight), ("bias", bias)):
        checks.check_vector("encoder_layer", name, value, projected)
    rng_state, dropout_p = dropout
    y, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
        projected, residual, x_bias, weight, bias, rng_state, dropout_p, spec.eps,
        spec.norm_type == "rms", True,
    )  # fmt: skip
    return (y, h) if pre_norm else y, (h, mean, rstd, weight, rng_state, *own)


def _norm_backward(dy, dsum, saved, ctx, needs):
    """(gradient of the residual, gradient of the sublayer's output, (gradients of x_bias, weight, bias, own weight)).

    Without dropout the first two are the same tensor. So accumulate into the residual's gradient only after the last
    use of the other.
    """
    h, mean, rstd, weight, rng_state, *own = saved
    needs_x_bias, needs_weight, needs_bias, needs_own = needs
    has_own = own[0] is not None
    spec, _ = ctx.norm
    dy = torch.zeros_like(h) if dy is None else dy
    dh, dx, dweight, dbias, dx_bias = torch.ops.fastenc.layer_norm_bwd(
        dy, dsum, h, mean, rstd, weight, rng_state, ctx.dropout_p, spec.norm_type == "rms",
        needs_weight or needs_bias, needs_x_bias and not has_own,
    )  # fmt: skip
    dprojected, down = dh if rng_state is None else dx, None
    if has_own:
        dprojected, _, down, _, dx_bias = torch.ops.fastenc.layer_norm_bwd(
            dprojected, None, *own, None, 0.0, spec.norm_type == "rms", needs_own, needs_x_bias
        )
    parameters = (
        dx_bias if needs_x_bias else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        down if needs_own else None,
    )
    return dh, dprojected, parameters


def _dtypes(*tensors):
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def _cast(gradients, dtypes):
    """The gradients in the given dtypes; those that differ are cast in one call."""
    cast = list(gradients)
    others = [i for i, g in enumerate(cast) if g is not None and g.dtype != dtypes[i]]
    copies = [torch.empty_like(cast[i], dtype=dtypes[i]) for i in others]
    if copies:
        torch._foreach_copy_(copies, [cast[i] for i in others])
    for i, copy in zip(others, copies, strict=True):
        cast[i] = copy
    return cast
