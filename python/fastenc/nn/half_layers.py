"""The two halves of a post-norm layer, each one node of the autograd graph.

Between ops, autograd adds the residual's gradient to that of the sublayer in a pass of its own. Inside one node the
residual's gradient is the accumulator of the product that forms the sublayer's, and nothing is saved that no gradient
needs. ``fastenc.nn.encoder_layer`` composes the same formulas of single ops, and decides which of the two runs.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from fastenc.ops import _checks, _dispatch
from fastenc.ops._column_sum import column_sum
from fastenc.ops._matmul import multiply


class AttentionHalf(torch.autograd.Function):
    """y = LN(x + dropout(Attention(x) W_out + b_out)); x (total_tokens, hidden_size) in the dtype of the products.

    No random state without dropout. Weights of another dtype (autocast) are cast; gradients have the weights' own.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        num_heads: int,
        attention_dropout: tuple[Tensor | None, float],
        out_dropout: tuple[Tensor | None, float],
        eps: float,
    ) -> Tensor:
        needs_x, needs_qkv, needs_qkv_bias, needs_out = ctx.needs_input_grad[:4]
        needs_attention = needs_x or needs_qkv or needs_qkv_bias
        ctx.dtypes = (qkv_weight.dtype, qkv_bias.dtype, out_weight.dtype)
        ctx.dtypes += (out_bias.dtype, norm_weight.dtype, norm_bias.dtype)
        qkv_weight, out_weight = qkv_weight.to(x.dtype), out_weight.to(x.dtype)
        head_dim = qkv_weight.shape[0] // (3 * num_heads)
        heads = multiply(x, qkv_weight.t(), qkv_bias.to(x.dtype))
        heads = heads.view(x.shape[0], 3, num_heads, head_dim)
        # Neither other keys nor biases nor a window.
        rng_state, dropout_p = attention_dropout
        tensors = (cu_seqlens, None, rng_state, None, None, None, None)
        ctx.attention = (max_seqlen, max_seqlen, dropout_p, head_dim**-0.5, -1, -1)
        mixed, lse = torch.ops.fastenc.attention_fwd(*heads.unbind(1), *tensors, *ctx.attention)
        projected = multiply(mixed.flatten(1), out_weight.t())
        ctx.dropout_p = out_dropout[1]
        y, *norm = _norm_forward(projected, x, out_bias, norm_weight, norm_bias, out_dropout, eps)
        ctx.save_for_backward(
            x if needs_qkv else None,
            qkv_weight if needs_x else None,
            out_weight if needs_attention else None,
            heads if needs_attention else None,
            mixed if needs_out or needs_attention else None,
            lse if needs_attention else None,
            cu_seqlens if needs_attention else None,
            attention_dropout[0],
            *norm,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        (x, qkv_weight, out_weight, heads, mixed, lse, cu_seqlens, attention_rng_state, *norm) = (
            ctx.saved_tensors
        )
        needs_x, needs_qkv, needs_qkv_bias, needs_out, *needs_norm = ctx.needs_input_grad[:7]
        with _no_autocast(dy):
            dx, dprojected, dnorm = _norm_backward(dy, norm, ctx.dropout_p, *needs_norm)
            dqkv_weight = dqkv_bias = dout_weight = None
            if needs_out:
                dout_weight = multiply(dprojected.t(), mixed.flatten(1))
            if needs_x or needs_qkv or needs_qkv_bias:
                dmixed = multiply(dprojected, out_weight).view(-1, *heads.shape[2:])
                tensors = (cu_seqlens, None, attention_rng_state, None, None, None, None)
                dqkv, *_ = torch.ops.fastenc.attention_bwd(
                    dmixed,
                    None,
                    mixed,
                    lse,
                    *heads.unbind(1),
                    *tensors,
                    *ctx.attention,
                    True,
                    False,
                )
                dqkv = dqkv.flatten(1)
                if needs_qkv:
                    dqkv_weight = multiply(dqkv.t(), x)
                if needs_qkv_bias:
                    dqkv_bias = column_sum(dqkv)
                if needs_x:
                    dx = multiply(dqkv, qkv_weight, added=dx)
        weights = _cast((dqkv_weight, dqkv_bias, dout_weight, *dnorm), ctx.dtypes)
        return dx if needs_x else None, *weights, *(None,) * 6


class FeedForwardHalf(torch.autograd.Function):
    """y = LN(x + dropout(GELU(x W_up + b_up) W_down + b_down)); arguments as those of :class:`AttentionHalf`."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        up_weight: Tensor,
        up_bias: Tensor,
        down_weight: Tensor,
        down_bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        tanh: bool,
        dropout: tuple[Tensor | None, float],
        eps: float,
    ) -> Tensor:
        needs_x, needs_up, needs_up_bias, needs_down = ctx.needs_input_grad[:4]
        needs_inner = needs_x or needs_up or needs_up_bias
        ctx.dtypes = (up_weight.dtype, up_bias.dtype, down_weight.dtype)
        ctx.dtypes += (down_bias.dtype, norm_weight.dtype, norm_bias.dtype)
        up_weight, down_weight = up_weight.to(x.dtype), down_weight.to(x.dtype)
        up = multiply(x, up_weight.t())
        _checks.check_vector("bias_gelu", "bias", up_bias, up)
        inner = torch.ops.fastenc.bias_gelu_fwd(up, up_bias, tanh)
        projected = multiply(inner, down_weight.t())
        ctx.tanh, ctx.dropout_p = tanh, dropout[1]
        y, *norm = _norm_forward(projected, x, down_bias, norm_weight, norm_bias, dropout, eps)
        ctx.save_for_backward(
            x if needs_up else None,
            up_weight if needs_x else None,
            down_weight if needs_inner else None,
            up if needs_inner else None,
            up_bias if needs_inner else None,
            inner if needs_down else None,
            *norm,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, up_weight, down_weight, up, up_bias, inner, *norm = ctx.saved_tensors
        needs_x, needs_up, needs_up_bias, needs_down, *needs_norm = ctx.needs_input_grad[:7]
        with _no_autocast(dy):
            dx, dprojected, dnorm = _norm_backward(dy, norm, ctx.dropout_p, *needs_norm)
            dup_weight = dup_bias = ddown_weight = None
            if needs_down:
                ddown_weight = multiply(dprojected.t(), inner)
            if needs_x or needs_up or needs_up_bias:
                dinner = multiply(dprojected, down_weight)
                dup, dup_bias = torch.ops.fastenc.bias_gelu_bwd(dinner, up, up_bias, ctx.tanh)
                if needs_up:
                    dup_weight = multiply(dup.t(), x)
                if needs_x:
                    dx = multiply(dup, up_weight, added=dx)
        dup_bias = dup_bias if needs_up_bias else None
        weights = _cast((dup_weight, dup_bias, ddown_weight, *dnorm), ctx.dtypes)
        return dx if needs_x else None, *weights, *(None,) * 3


def _norm_forward(projected, residual, x_bias, weight, bias, dropout, eps):
    """y = LN(residual + dropout(projected + x_bias)), and what its backward needs."""
    _checks.check_like("layer_norm", "residual", residual, projected)
    for name, value in (("x_bias", x_bias), ("weight", weight), ("bias", bias)):
        _checks.check_vector("layer_norm", name, value, projected)
    rng_state, dropout_p = dropout
    y, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
        projected, residual, x_bias, weight, bias, rng_state, dropout_p, eps, False, True
    )
    return y, h, mean, rstd, weight, rng_state


def _norm_backward(dy, saved, dropout_p, needs_x_bias, needs_weight, needs_bias):
    """(the residual's gradient, the sublayer's, (those of x_bias, weight and bias)).

    Without dropout the first two are one tensor: accumulate into it last.
    """
    h, mean, rstd, weight, rng_state = saved
    wants_affine = needs_weight or needs_bias
    dh, dx, dweight, dbias, dx_bias = torch.ops.fastenc.layer_norm_bwd(
        dy, None, h, mean, rstd, weight, rng_state, dropout_p, False, wants_affine, needs_x_bias
    )
    parameters = (
        dx_bias if needs_x_bias else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
    )
    return dh, dh if rng_state is None else dx, parameters


def _no_autocast(x: Tensor):
    """A backward called inside autocast computes in the forward's dtype all the same."""
    device = x.device.type
    if _dispatch.autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _cast(gradients, dtypes):
    return (None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))
