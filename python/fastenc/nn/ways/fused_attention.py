"""The self-attention sublayer, with any kind of attention, as one node of the autograd graph."""

import torch
from torch import Tensor

from fastenc.nn.block_plan import plan_of
from fastenc.nn.global_attention import local_arguments
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import AttentionSpec, NormSpec
from fastenc.nn.layer_weights import CastWeights
from fastenc.nn.ways.sublayer_end import (
    cast_gradients,
    dtypes_of,
    end_sublayer,
    end_sublayer_backward,
    mask_state,
)
from fastenc.ops import dispatch
from fastenc.ops.attention import self_attention_call
from fastenc.ops.attention_kernels import TENSORS
from fastenc.ops.column_sum import column_sum
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.gemm import gemm


class FusedAttention(torch.autograd.Function):
    """Norm(residual + dropout(OwnNorm(Attention(x) W_out + b_out))), and with pre-norm also the sum inside the norm.

    Weights are cast to x's dtype (autocast). Gradients have the dtypes of the weights. ``norm`` is the description of
    the norm, and whether the layer is pre-norm. A residual that is x is given as None; its gradient is part of x's.
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
        needs_x, _, needs_qkv, _, needs_out, *_ = ctx.needs_input_grad
        needs_attention = _needs_attention(ctx)
        ctx.dtypes = dtypes_of(
            qkv_weight, qkv_bias, out_weight, out_bias, norm_weight, norm_bias, own_norm_weight,
            relative_bias, position_keys, position_queries, query_norm_weight, key_norm_weight, of_globals,
        )  # fmt: skip
        ctx.spec, head_norms = spec, (query_norm_weight, key_norm_weight)
        if cast is not None:
            qkv_weight, qkv_bias = cast.qkv_weight, cast.qkv_bias
            out_weight = cast.attention_out_weight
        qkv_weight, out_weight = qkv_weight.to(x.dtype), out_weight.to(x.dtype)
        qkv = gemm(x, qkv_weight.t(), None if qkv_bias is None else qkv_bias.to(x.dtype))
        qkv = spec.split_qkv(qkv)
        ctx.op = attention_op(inputs, spec)
        positions = position_keys, position_queries
        tensors, ctx.numbers = _arguments(x, inputs, relative_bias, positions, spec, dropout)
        q, k, v = spec.parts(qkv)
        if spec.head_norm_eps is not None:
            (q, _), (k, _) = _normalised_heads((q, k), head_norms, spec)
        forward = getattr(torch.ops.fastenc, f"{ctx.op}_fwd")
        attended, lse = forward(q, k, v, *tensors, *ctx.numbers)
        if of_globals is not None:
            attended.index_copy_(0, inputs.global_tokens, of_globals)
        projected = gemm(attended.flatten(1), out_weight.t())
        results, saved = end_sublayer(
            ctx, projected, x if residual is None else residual, out_bias, norm_weight, norm_bias,
            own_norm_weight, norm, (dropout.attention_out, dropout.rng_states[1]),
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
        ctx.count = len(tensors) if needs_attention else 0
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, qkv_weight, out_weight, qkv, attended, lse, *rest = ctx.saved_tensors
        head_norms, tensors, saved = rest[:2], rest[2 : 2 + ctx.count], rest[2 + ctx.count :]
        needs_x, needs_residual, needs_qkv, _, needs_out, *others = ctx.needs_input_grad
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dend = end_sublayer_backward(ctx, dy, dsum, saved, others[:4])
            dx = dqkv_weight = dqkv_bias = dout_weight = None
            of_kind: tuple[Tensor | None, ...] = (None,) * 6
            if needs_out:
                dout_weight = gemm(dprojected.t(), attended.flatten(1), dtype=ctx.dtypes[2])
            if _needs_attention(ctx):
                dattended = gemm(dprojected, out_weight).view(attended.shape)
                dqkv, dqkv_bias, of_kind = _attention_backward(
                    ctx, dattended, attended, lse, qkv, tensors, head_norms
                )
                if needs_qkv:
                    dqkv_weight = gemm(dqkv.t(), x, dtype=ctx.dtypes[0])
                if needs_x:
                    dx = gemm(dqkv, qkv_weight, added=dresidual if ctx.one_input else None)
        gradients = dqkv_weight, dqkv_bias, dout_weight, *dend, *of_kind
        cast = cast_gradients(gradients, ctx.dtypes)
        return dx, dresidual if needs_residual else None, *cast, *(None,) * 5


def attention_op(inputs: AttentionInputs, spec: AttentionSpec) -> str:
    """The name of the op that computes this kind of attention."""
    if inputs.block_plan is not None:
        return "block_sparse_attention"
    if spec.position_terms:
        return "disentangled_attention"
    return "attention" if inputs.global_tokens is None else "global_window_attention"


def _arguments(
    x: Tensor,
    inputs: AttentionInputs,
    relative_bias: Tensor | None,
    positions: tuple[Tensor | None, Tensor | None],
    spec: AttentionSpec,
    dropout: LayerDropout,
) -> tuple[tuple[Tensor | None, ...], tuple]:
    """The arguments of :func:`attention_op` after q, k and v: the tensors, and the numbers.

    ``positions``: the keys and the queries of relative positions.
    """
    plan = plan_of(inputs, spec)
    if plan is not None:
        # Without dropout of the weights, as in transformers.
        return (*plan, inputs.cu_seqlens), (inputs.max_seqlen, spec.block_size, spec.scale)
    dropout_p = dropout.attention
    rng_state = mask_state(x, dropout_p, dropout.rng_states[0])
    if spec.position_terms:
        assert inputs.relative_positions is not None  # run_fused_sublayers has read them
        tensors = (*positions, inputs.relative_positions.slots, inputs.cu_seqlens, rng_state)
        return tensors, (inputs.max_seqlen, dropout_p, spec.scale)
    if inputs.global_tokens is not None:
        return local_arguments(inputs, spec, dropout_p, rng_state)
    all_blocks, long_blocks = inputs.blocks or (None, None)
    attention_call = self_attention_call(
        inputs.cu_seqlens,
        inputs.max_seqlen,
        scale=spec.scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
        relative_bias=None if relative_bias is None else relative_bias.float(),
        key_bias=inputs.key_bias,
        rotary=inputs.rotary,
        bounds=inputs.bounds,
        all_blocks=all_blocks,
        long_blocks=long_blocks,
        window_left=spec.window[0],
        window_right=spec.window[1],
    )
    return attention_call.tensors(), attention_call[TENSORS:]


def _needs_attention(ctx) -> bool:
    """Whether something before the product with ``out_weight`` needs a gradient."""
    needs = ctx.needs_input_grad
    return needs[0] or needs[2] or needs[3] or any(needs[9:15])


def _attention_backward(ctx, dattended, attended, lse, qkv, tensors, head_norms):
    """The gradients of the product qkv, of its bias, and of the inputs that only some kinds of attention have.

    The last are in the order of the node's arguments, from ``relative_bias`` to ``of_globals``.
    """
    spec, needs_qkv_bias = ctx.spec, ctx.needs_input_grad[3]
    needs_relative_bias, needs_keys, needs_queries, *needs_head_norms = ctx.needs_input_grad[9:14]
    # That of normalised queries and keys would not be the bias's.
    sums_columns = needs_qkv_bias and spec.head_norm_eps is None
    drelative_bias = dkeys = dqueries = dof_globals = None
    dhead_norms: tuple[Tensor | None, Tensor | None] = (None, None)
    q, k, v = spec.parts(qkv)
    if spec.head_norm_eps is not None:
        # Computed again, so that the forward need not keep them.
        (q, of_q), (k, of_k) = _normalised_heads((q, k), head_norms, spec)
    backward = getattr(torch.ops.fastenc, f"{ctx.op}_bwd")
    arguments = (attended, lse, q, k, v, *tensors, *ctx.numbers)
    if ctx.op == "attention":
        dqkv, _, _, drelative_bias, dbias = backward(
            dattended, None, *arguments, True, needs_relative_bias, sums_columns
        )
    elif ctx.op == "disentangled_attention":
        dqkv, dkeys, dqueries, dbias = backward(dattended, *arguments, sums_columns)
    else:
        dqkv, dbias = backward(dattended, *arguments, sums_columns)
    if ctx.op == "global_window_attention":
        dof_globals = dattended[tensors[0]]
    dqkv = dqkv.view(qkv.shape)
    if spec.head_norm_eps is not None:
        dhead_norms = _head_norms_backward(spec.parts(dqkv)[:2], (of_q, of_k), needs_head_norms)
        dbias = column_sum(dqkv.flatten(1)) if needs_qkv_bias else None
    of_kind = (
        drelative_bias if needs_relative_bias else None,
        dkeys if needs_keys else None,
        dqueries if needs_queries else None,
        *dhead_norms,
        dof_globals,
    )
    dqkv_bias = spec.join_qkv(dbias.view(1, *qkv.shape[1:]))[0] if needs_qkv_bias else None
    return spec.join_qkv(dqkv), dqkv_bias, of_kind


def _normalised_heads(heads, weights, spec: AttentionSpec):
    """For queries and keys (total_tokens, heads, head_dim): their norm, and (input, mean, rstd, weight, is_rms)."""
    together, results = spec.normalises_heads_together, []
    for each, weight in zip(heads, weights, strict=True):
        x = (each.flatten(1) if together else each).contiguous()
        y, _, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
            x, None, None, weight, None, None, 0.0, spec.head_norm_eps, not together, True
        )
        results.append((y.view(each.shape), (x, mean, rstd, weight, not together)))
    return results


def _head_norms_backward(dheads, saved, needs) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the two weights; the gradients of queries and keys are changed in place to those before it."""
    dweights = []
    for dy, (x, *of_norm, is_rms), needed in zip(dheads, saved, needs, strict=True):
        dx, _, dweight, _, _ = torch.ops.fastenc.layer_norm_bwd(
            dy.contiguous().view(x.shape), None, x, *of_norm, None, 0.0, is_rms, needed, False
        )
        dy.copy_(dx.view(dy.shape))
        dweights.append(dweight if needed else None)
    return dweights[0], dweights[1]
