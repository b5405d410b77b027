"""Bias and gated linear unit (GeGLU, SwiGLU) in one pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.activation import GATED, NUMBERS
from fastenc.ops.cases import Draw, Size, declare_case
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.reference import bias_glu as reference

declare("bias_glu", "cpp", "triton")


def bias_glu(
    x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu", impl: str = "auto"
) -> Tensor:
    """act(x_a + b_a) * (x_b + b_b) in one pass; the backward computes the gradients of x and bias in one pass too.

        x = (x_a, x_b), bias = (b_a, b_b): first and second half of the last dimension
        "gelu": act(u) = u * P(u), P the CDF of the standard normal distribution;  "gelu_tanh": its tanh form
        "silu": act(u) = u / (1 + e^-u)

    The activation is applied to the first half, as in ModernBERT's ``Wi``, in T5 v1.1's stacked (wi_0, wi_1) and in
    LLaMA's stacked (gate_proj, up_proj). ``torch.nn.functional.glu`` applies it to the second half.

    Args:
        x: (..., 2 * intermediate_size), floating point.
        bias: (2 * intermediate_size,) or None; any floating dtype.
        activation: "gelu" (GeGLU), "gelu_tanh" or "silu" (SwiGLU).
        impl: "auto", "cpp", "triton" or "reference".
    Returns: (..., intermediate_size), dtype of x.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. "gelu" of 2-byte types on a GPU has the error that :func:`fastenc.ops.bias_gelu` states.
    Deterministic: yes. Differentiable: x, bias.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    checks.check_floating("bias_glu", x)
    if x.shape[-1] % 2:
        raise ValueError(
            f"bias_glu: the last dimension of x must be even, because it has two halves, got {x.shape[-1]}: "
            "stack the weights of gate and value into one"
        )
    checks.check_vector("bias_glu", "bias", bias, x)
    if activation not in GATED:
        raise ValueError(f"bias_glu: activation must be one of {GATED}, got {activation!r}")
    if choose("bias_glu", impl, x) == "reference":
        return reference.bias_glu(x, bias, activation=activation)
    number = NUMBERS[activation]
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _BiasGlu.apply(x, bias, number)
    return torch.ops.fastenc.bias_glu_fwd(x, bias, number)


class _BiasGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, activation):
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        return torch.ops.fastenc.bias_glu_fwd(x, bias, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.fastenc.bias_glu_bwd(dy, x, bias, ctx.activation)
        return dx, dbias.to(bias.dtype) if ctx.needs_input_grad[1] else None, None


def _fake_forward(x, bias, activation):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_backward(dy, x, bias, activation):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1] if bias is not None else 0
    return dx, x.new_empty((width,), dtype=torch.float32)


define(
    "bias_glu_fwd(Tensor x, Tensor? bias, int activation) -> Tensor",
    _fake_forward,
    triton="bias_glu.bias_glu_forward",
)
define(
    "bias_glu_bwd(Tensor dy, Tensor x, Tensor? bias, int activation) -> (Tensor, Tensor)",
    _fake_backward,
    triton="bias_glu.bias_glu_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.normal(*draw.leading(size.tokens), 2 * size.inner),
        "bias": draw.choice(draw.parameter(2 * size.inner), None),
        "activation": draw.choice(*GATED),
    }


def _plain(x: Tensor, bias: Tensor, activation: str) -> Tensor:
    gate, value = (x + bias).chunk(2, dim=1)
    return F.gelu(gate) * value


declare_case(bias_glu, _case_inputs, _plain)
