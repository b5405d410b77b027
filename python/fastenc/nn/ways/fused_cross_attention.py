"""The sublayer that attends to a source, as one node of the autograd graph."""

import torch
from torch import Tensor

from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_inputs import Source
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


class FusedCrossAttention(torch.autograd.Function):
    """Norm(residual + dropout(Attention(x, states) W_out + b_out)), and with pre-norm also the sum.

    Other arguments as in :class:`fastenc.nn.ways.fused_attention.FusedAttention`.
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
        ctx.dtypes = dtypes_of(
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
        attention_call = self_attention_call(
            source.cu_targets,
            source.max_targets,
            scale=spec.scale,
            dropout_p=dropout.cross,
            rng_state=mask_state(x, dropout.cross, dropout.rng_states[3]),
            cu_seqlens_k=source.cu_seqlens,
            max_seqlen_k=source.max_seqlen,
        )
        attended, lse = torch.ops.fastenc.attention_fwd(q, *kv.unbind(1), *attention_call)
        projected = gemm(attended.flatten(1), out_weight.t())
        results, saved = end_sublayer(
            ctx, projected, x if residual is None else residual, out_bias, norm_weight, norm_bias,
            None, norm, (dropout.cross_out, dropout.rng_states[4]),
        )  # fmt: skip
        ctx.one_input, ctx.numbers = residual is None, attention_call[TENSORS:]
        ctx.save_for_backward(
            x, states, query_weight, key_value_weight, out_weight, q, kv, attended, lse,
            *attention_call.tensors(), *saved,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, states, query_weight, key_value_weight, out_weight, q, kv, attended, lse, *rest = (
            ctx.saved_tensors
        )
        tensors, saved = rest[:TENSORS], rest[TENSORS:]
        needs = ctx.needs_input_grad
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dend = end_sublayer_backward(
                ctx, dy, dsum, saved, (*needs[8:11], False)
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
        weights = cast_gradients(
            (dquery_weight, dquery_bias, dkey_value_weight, dkey_value_bias, dout_weight, *dend[:3]), ctx.dtypes,
        )  # fmt: skip
        return dx, dresidual if needs[1] else None, dstates, *weights, *(None,) * 5
