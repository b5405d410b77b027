"""Bias and GELU in one pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.reference import bias_gelu as reference

declare("bias_gelu", "cpp", "triton")


def bias_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    inplace: bool = False,
    impl: str = "auto",
) -> Tensor:
    """gelu(x + bias) in one pass; the backward computes the gradients of x and bias in one pass too.

        approximate="none":  gelu(u) = u * P(u), P the CDF of the standard normal distribution (BERT's form)
        approximate="tanh":  gelu(u) = u/2 * (1 + tanh(sqrt(2/pi) * (u + 0.044715 u^3)))

    Args:
        x: (..., intermediate_size), floating point.
        bias: (intermediate_size,) or None; any floating dtype.
        inplace: write the result into x, which avoids the page faults of a new large buffer; without gradients only.
        impl: "auto", "cpp", "triton" or "reference".
    Returns: shape and dtype of x.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. On a GPU, for 2-byte types, P is the sigmoid of a polynomial. Its absolute error against
        the erf form is at most 4e-6, and that of the slope at most 1.7e-5.
    Deterministic: yes. Differentiable: x, bias.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    checks.check_floating("bias_gelu", x)
    checks.check_vector("bias_gelu", "bias", bias, x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"bias_gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    differentiable = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    if inplace and differentiable:
        raise ValueError(
            "bias_gelu: inplace would overwrite the x that the gradient needs; "
            "leave it False, or run under torch.no_grad()"
        )
    if choose("bias_gelu", impl, x) == "reference":
        y = reference.bias_gelu(x, bias, approximate=approximate)
        return x.copy_(y) if inplace else y
    tanh = approximate == "tanh"
    if inplace and x.is_contiguous():
        torch.ops.fastenc.bias_gelu_(x, bias, tanh)
        return x
    if differentiable:
        return _BiasGelu.apply(x, bias, tanh)
    y = torch.ops.fastenc.bias_gelu_fwd(x, bias, tanh)
    return x.copy_(y) if inplace else y


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, tanh):
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return torch.ops.fastenc.bias_gelu_fwd(x, bias, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.fastenc.bias_gelu_bwd(dy, x, bias, ctx.tanh)
        return dx, dbias.to(bias.dtype) if ctx.needs_input_grad[1] else None, None


def _fake_forward(x, bias, tanh):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(dy, x, bias, tanh):
    width = x.shape[-1] if bias is not None else 0
    return _fake_forward(x, bias, tanh), x.new_empty((width,), dtype=torch.float32)


define(
    "bias_gelu_(Tensor(a!) x, Tensor? bias, bool tanh) -> ()",
    lambda x, bias, tanh: None,
    triton="bias_gelu.bias_gelu_in_place",
)
define(
    "bias_gelu_fwd(Tensor x, Tensor? bias, bool tanh) -> Tensor",
    _fake_forward,
    triton="bias_gelu.bias_gelu_forward",
)
define(
    "bias_gelu_bwd(Tensor dy, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    _fake_backward,
    triton="bias_gelu.bias_gelu_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(*draw.leading(size.tokens), size.inner),
        "bias": draw.choice(draw.parameter(size.inner), None),
        "approximate": draw.choice("none", "tanh"),
    }


declare_case(bias_gelu, _case_inputs, lambda x, bias, approximate: F.gelu(x + bias))
