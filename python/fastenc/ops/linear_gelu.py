"""Two linear layers with GELU between them, bias and GELU in the matrix products' epilogues."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.bias_gelu import bias_gelu
from fastenc.ops.cases import Draw, Size, declare_case
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import autocast_dtype, choose, declare
from fastenc.ops.gemm import gemm, linear
from fastenc.ops.library import define
from fastenc.reference import linear_gelu as reference

SWITCH = "FASTENC_LINEAR_GELU"

declare("linear_gelu", "triton", dtypes=(torch.float16, torch.bfloat16), switch=SWITCH)


def linear_gelu(
    x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, *, impl: str = "auto"
) -> Tensor:
    """gelu(x up_weight^T + up_bias) down_weight^T, an encoder's feed-forward layer without its last bias.

    The Triton kernels compute bias and GELU in the epilogue of the first product. The gradient's product with
    down_weight has the slope of GELU and the sum for up_bias in its epilogue. "auto" takes them only if the environment
    variable FASTENC_LINEAR_GELU is 1, because on an H200 they take 1.2 times as long. Otherwise the products are
    PyTorch's, or ours on a CPU, with :func:`bias_gelu` between them.

    Args:
        x: (..., in_features), floating point.
        up_weight: (inner, in_features), up_bias: (inner,), down_weight: (out_features, inner); x's dtype.
        impl: "auto", "triton" (float16 and bfloat16) or "reference".
    Returns: (..., out_features), dtype of x.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 sums; u = x up_weight^T + up_bias and gelu(u) are rounded to x's dtype. The Triton kernels apply GELU
        to u before it is rounded, with the errors of :func:`bias_gelu`. Under autocast, all inputs are cast first.
    Deterministic: yes. Differentiable: x, up_weight, up_bias, down_weight.
    Memory: u and gelu(u) are kept for the backward.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    weights = up_weight, up_bias, down_weight
    dtype = _check(x, *weights)
    cast = x.to(dtype)
    if impl == "auto" and not in_epilogue(cast):
        return linear(bias_gelu(linear(x, up_weight), up_bias), down_weight)
    if choose("linear_gelu", impl, cast) == "reference":
        return reference.linear_gelu(cast, *(weight.to(dtype) for weight in weights))
    rows = cast.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _LinearGelu.apply(rows, *weights).view(*x.shape[:-1], down_weight.shape[0])


def in_epilogue(x: Tensor) -> bool:
    """Whether "auto" takes the products with epilogues for an x of this dtype and device."""
    return choose("linear_gelu", "auto", x) != "reference"


def _check(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor) -> torch.dtype:
    """The dtype to compute in. Raises ValueError if the arguments do not fit each other."""
    op = "linear_gelu"
    checks.check_floating(op, x)
    if up_weight.dim() != 2 or up_weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: up_weight must have shape (inner, {x.shape[-1]}), got {tuple(up_weight.shape)}"
        )
    inner = up_weight.shape[0]
    if up_bias.shape != (inner,):
        raise ValueError(f"{op}: up_bias must have shape ({inner},), got {tuple(up_bias.shape)}")
    if down_weight.dim() != 2 or down_weight.shape[1] != inner:
        raise ValueError(
            f"{op}: down_weight must have shape (out_features, {inner}), got {tuple(down_weight.shape)}"
        )
    named = {"up_weight": up_weight, "up_bias": up_bias, "down_weight": down_weight}
    for name, value in named.items():
        checks.check_parameter(op, name, value, x)
    dtype = autocast_dtype(x.device.type)
    for name, value in named.items():
        if dtype is None and value.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name} must have x's dtype {x.dtype}, got {value.dtype}: cast one of them"
            )
    return dtype or x.dtype


class _LinearGelu(torch.autograd.Function):
    """Weights are cast to x's dtype (autocast). Gradients have the dtypes given."""

    @staticmethod
    def forward(ctx, x, up_weight, up_bias, down_weight):
        ctx.dtypes = up_weight.dtype, up_bias.dtype, down_weight.dtype
        up_weight, up_bias, down_weight = (t.to(x.dtype) for t in (up_weight, up_bias, down_weight))
        inner, u = torch.ops.fastenc.linear_gelu_fwd(x, up_weight, up_bias)
        ctx.save_for_backward(x, up_weight, down_weight, u, inner)
        return gemm(inner, down_weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, up_weight, down_weight, u, inner = ctx.saved_tensors
        needs_x, needs_up, needs_bias, needs_down = ctx.needs_input_grad
        up_dtype, bias_dtype, down_dtype = ctx.dtypes
        dx = dup = dbias = ddown = None
        if needs_down:
            ddown = gemm(dy.t(), inner, dtype=down_dtype).to(down_dtype)
        if needs_x or needs_up or needs_bias:
            du, sums = torch.ops.fastenc.linear_gelu_bwd(dy, down_weight, u)
            dbias = sums.to(bias_dtype) if needs_bias else None
            dup = gemm(du.t(), x, dtype=up_dtype).to(up_dtype) if needs_up else None
            dx = gemm(du, up_weight) if needs_x else None
        return dx, dup, dbias, ddown


def _fake_forward(x, weight, bias):
    y = x.new_empty((x.shape[0], weight.shape[0]))
    return y, torch.empty_like(y)


def _fake_backward(dy, weight, u):
    du = torch.empty_like(u, memory_format=torch.contiguous_format)
    return du, u.new_empty((u.shape[1],), dtype=torch.float32)


define(
    "linear_gelu_fwd(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
    _fake_forward,
    triton="linear_gelu.linear_gelu_forward",
)
define(
    "linear_gelu_bwd(Tensor dy, Tensor weight, Tensor u) -> (Tensor, Tensor)",
    _fake_backward,
    triton="linear_gelu.linear_gelu_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    width, inner = size.width, size.inner
    return {
        "x": draw.normal(*draw.leading(size.tokens), width),
        "up_weight": draw.normal(inner, width, scale=width**-0.5),
        "up_bias": draw.normal(inner),
        "down_weight": draw.normal(width, inner, scale=inner**-0.5),
    }


def _plain(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias)), down_weight)


declare_case(linear_gelu, _case_inputs, _plain)
