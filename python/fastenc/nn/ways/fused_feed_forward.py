"""The feed-forward sublayer as one node of the autograd graph."""

import torch
from torch import Tensor

from fastenc.nn.activation import activate, drop
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import FeedForwardSpec, NormSpec
from fastenc.nn.layer_weights import CastWeights
from fastenc.nn.ways.sublayer_end import (
    cast_gradients,
    dtypes_of,
    end_sublayer,
    end_sublayer_backward,
)
from fastenc.ops import activation, checks, dispatch
from fastenc.ops.column_sum import column_sum
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.gemm import gemm
from fastenc.ops.linear_gelu import in_epilogue


class FusedFeedForward(torch.autograd.Function):
    """Norm(residual + dropout(OwnNorm(FFN(x)))), and with pre-norm also the sum inside the norm.

    Arguments as in :class:`fastenc.nn.ways.fused_attention.FusedAttention`.
    """

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
        needs_x, _, needs_up, needs_up_bias, needs_down, *_ = ctx.needs_input_grad
        needs_inner = needs_x or needs_up or needs_up_bias
        ctx.dtypes = dtypes_of(
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
        results, saved = end_sublayer(
            ctx, projected, x if residual is None else residual, down_bias, norm_weight, norm_bias,
            own_norm_weight, norm, (dropout.down, dropout.rng_states[2]),
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
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dsum: Tensor | None = None):
        x, up_weight, down_weight, up, up_bias, inner, mask, *saved = ctx.saved_tensors
        needs_x, needs_residual, needs_up, needs_up_bias, needs_down, *of_end = ctx.needs_input_grad
        with dispatch.no_autocast(saved[0]):
            dresidual, dprojected, dend = end_sublayer_backward(ctx, dy, dsum, saved, of_end[:4])
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
                if needs_x:
                    dx = gemm(dup, up_weight, added=dresidual if ctx.one_input else None)
        dup_bias = dup_bias if needs_up_bias else None
        weights = cast_gradients((dup_weight, dup_bias, ddown_weight, *dend), ctx.dtypes)
        return dx, dresidual if needs_residual else None, *weights, *(None,) * 4


def _activate(up: Tensor, bias: Tensor | None, spec: FeedForwardSpec) -> Tensor:
    """:func:`fastenc.nn.layer.activate`, without the checks of its ops."""
    if spec.gated and spec.activation in activation.GATED:
        number = activation.NUMBERS[spec.activation]
        return torch.ops.fastenc.bias_glu_fwd(up, bias, number)
    if not spec.gated and spec.activation in ("gelu", "gelu_tanh"):
        return torch.ops.fastenc.bias_gelu_fwd(up, bias, spec.activation == "gelu_tanh")
    return activate(up, bias, spec)


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
        (dup,) = torch.autograd.grad(activate(biased, None, spec), biased, dinner)
    return dup, None if bias is None else column_sum(dup)
