"""LayerNorm and RMSNorm with bias, dropout and residual fused before them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, widened
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.reference import layer_norm as reference

declare("layer_norm", "cpp", "triton")
declare("rms_norm", "cpp", "triton")


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    eps: float = 1e-5,
    return_residual_sum: bool = False,
    impl: str = "auto",
) -> Any:
    """LayerNorm(residual + dropout(x + x_bias)) in one pass.

        h = residual + dropout(x + x_bias)
        y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias

    Args:
        x: (..., hidden_size), floating point.
        weight, bias: (hidden_size,) or None; any floating dtype.
        residual: x's shape and dtype, or None.
        x_bias: (hidden_size,) or None, the bias of the linear layer that made x.
        dropout_p: probability of zeroing an element, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation.
        rng_state: int64 (2,), seed and offset of the mask, on x's device; None draws them from the device's default
            generator.
        eps: added to the variance.
        return_residual_sum: return h too, as a pre-norm layer needs it: h is the residual of the next sum. Its gradient
            is added to h's own in the same pass.
        impl: "auto", "cpp", "triton" (hidden_size up to 8192) or "reference".
    Returns: y, shape and dtype of x; with return_residual_sum (y, h), both so.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 statistics. Deterministic: yes. Differentiable: x, weight, bias, residual, x_bias.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    _check("layer_norm", x, weight, bias, residual, x_bias, dropout_p, eps)
    rng_state = checks.mask_rng_state("layer_norm", rng_state, dropout_p, x)
    if choose("layer_norm", impl, x, triton_limit=_triton_limit(x)) == "reference":
        return reference.layer_norm(
            x,
            weight,
            bias,
            residual=residual,
            x_bias=x_bias,
            dropout_p=dropout_p,
            rng_state=rng_state,
            eps=eps,
            return_residual_sum=return_residual_sum,
        )
    return _run(
        return_residual_sum, x, residual, x_bias, weight, bias, rng_state, dropout_p, eps, False
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    eps: float = 1e-6,
    return_residual_sum: bool = False,
    impl: str = "auto",
) -> Any:
    """RMSNorm(residual + dropout(x + x_bias)) in one pass.

        y = h / sqrt(mean(h^2) + eps) * weight,  h = residual + dropout(x + x_bias)

    Arguments, result, errors and numerics as :func:`layer_norm`.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check("rms_norm", x, weight, None, residual, x_bias, dropout_p, eps)
    rng_state = checks.mask_rng_state("rms_norm", rng_state, dropout_p, x)
    if choose("rms_norm", impl, x, triton_limit=_triton_limit(x)) == "reference":
        return reference.rms_norm(
            x,
            weight,
            residual=residual,
            x_bias=x_bias,
            dropout_p=dropout_p,
            rng_state=rng_state,
            eps=eps,
            return_residual_sum=return_residual_sum,
        )
    return _run(
        return_residual_sum, x, residual, x_bias, weight, None, rng_state, dropout_p, eps, True
    )


def _triton_limit(x: Tensor) -> str | None:
    return None if x.shape[-1] <= 8192 else f"hidden_size must be at most 8192, got {x.shape[-1]}"


def _check(op, x, weight, bias, residual, x_bias, dropout_p, eps):
    checks.check_floating(op, x)
    for name, value in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        checks.check_vector(op, name, value, x)
    checks.check_like(op, "residual", residual, x)
    checks.check_dropout(op, dropout_p)
    checks.check_eps(op, eps)


def _run(return_residual_sum, *arguments):
    if torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in arguments
    ):
        return _LayerNorm.apply(return_residual_sum, *arguments)
    y, h, _, _ = torch.ops.fastenc.layer_norm_fwd(*arguments, return_residual_sum)
    if not return_residual_sum:
        return y
    x, residual, x_bias, _, _, rng_state = arguments[:6]
    return y, h if _changes_x(residual, x_bias, rng_state) else x


def _changes_x(residual: Tensor | None, x_bias: Tensor | None, rng_state: Tensor | None) -> bool:
    """Whether h is another tensor than x; the ops return an empty one otherwise."""
    return residual is not None or x_bias is not None or rng_state is not None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        return_residual_sum,
        x,
        residual,
        x_bias,
        weight,
        bias,
        rng_state,
        dropout_p,
        eps,
        rms,
    ):
        y, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
            x, residual, x_bias, weight, bias, rng_state, dropout_p, eps, rms, True
        )
        changes_x = _changes_x(residual, x_bias, rng_state)
        if not changes_x:
            h = x.contiguous()
        ctx.save_for_backward(h, mean, rstd, weight, bias, x_bias, rng_state)
        ctx.dropout_p, ctx.rms = dropout_p, rms
        ctx.set_materialize_grads(False)
        if not return_residual_sum:
            return y
        return y, h if changes_x else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dresidual_sum=None):
        h, mean, rstd, weight, bias, x_bias, rng_state = ctx.saved_tensors
        needs_x, needs_residual, needs_x_bias, needs_weight, needs_bias = ctx.needs_input_grad[1:6]
        dh, dx, dweight, dbias, dx_bias = torch.ops.fastenc.layer_norm_bwd(
            torch.zeros_like(h) if dy is None else dy,
            dresidual_sum,
            h,
            mean,
            rstd,
            weight,
            rng_state,
            ctx.dropout_p,
            ctx.rms,
            needs_weight or needs_bias,
            needs_x_bias,
        )
        return (
            None,
            (dh if rng_state is None else dx) if needs_x else None,
            dh if needs_residual else None,
            dx_bias.to(x_bias.dtype) if needs_x_bias else None,
            dweight.to(weight.dtype) if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            *(None,) * 4,
        )


def _fake_forward(x, residual, x_bias, weight, bias, rng_state, dropout_p, eps, rms, save):
    changes_x = _changes_x(residual, x_bias, rng_state)
    # Size.numel() would make the size a constant of torch.compile's graph.
    rows = math.prod(x.shape[:-1]) if save else 0
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics = lambda: x.new_empty((rows,), dtype=torch.float32)
    return (
        y,
        torch.empty_like(y) if save and changes_x else x.new_empty((0,)),
        statistics(),
        statistics(),
    )


def _fake_backward(
    dy,
    dresidual_sum,
    h,
    mean,
    rstd,
    weight,
    rng_state,
    dropout_p,
    rms,
    wants_affine,
    wants_x_bias,
):
    width = h.shape[-1]
    sums = lambda wanted: h.new_empty((width if wanted else 0,), dtype=torch.float32)
    dx = torch.empty_like(h) if rng_state is not None else h.new_empty((0,))
    return torch.empty_like(h), dx, sums(wants_affine), sums(wants_affine), sums(wants_x_bias)


define(
    "layer_norm_fwd(Tensor x, Tensor? residual, Tensor? x_bias, Tensor? weight, Tensor? bias, Tensor? rng_state, "
    "float dropout_p, float eps, bool rms, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_forward,
    triton="layer_norm.layer_norm_forward",
)
define(
    "layer_norm_bwd(Tensor dy, Tensor? dresidual_sum, Tensor h, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? rng_state, float dropout_p, bool rms, bool wants_affine, bool wants_x_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
    triton="layer_norm.layer_norm_backward",
)


def _norm_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    shape = (*draw.leading(size.tokens), size.width)
    return {
        "x": draw.normal(*shape),
        "residual": draw.choice(draw.normal(*shape), None),
        "x_bias": draw.choice(draw.parameter(size.width), None),
        "weight": draw.choice(draw.parameter(size.width), None),
        "dropout_p": draw.choice(0.0, 0.1, 0.9),
        "eps": draw.choice(1e-6, 1e-3),
    }


def _layer_norm_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {**_norm_inputs(size, draw), "bias": draw.choice(draw.parameter(size.width), None)}


def _plain_layer_norm(x, residual, x_bias, weight, dropout_p, eps, bias) -> Tensor:
    return F.layer_norm(residual + (x + x_bias), weight.shape, weight, bias, eps)


def _plain_rms_norm(x, residual, x_bias, weight, dropout_p, eps) -> Tensor:
    return F.rms_norm(residual + (x + x_bias), weight.shape, weight, eps)


def _plain_with_sum(x, residual, x_bias, weight, return_residual_sum, **options) -> Tensor:
    h = residual + (x + x_bias)
    return torch.cat([_plain_rms_norm(x, residual, x_bias, weight, **options), h])


declare_case(layer_norm, _layer_norm_inputs, _plain_layer_norm)
declare_case(rms_norm, _norm_inputs, _plain_rms_norm)
declare_case(
    rms_norm,
    lambda size, draw: {**_norm_inputs(size, draw), "return_residual_sum": True},
    _plain_with_sum,
    "with the residual sum",
    result=torch.cat,
)


def _head_norm_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    x = draw.normal(size.tokens, size.heads, size.head_dim)
    return {"x": x, "weight": draw.parameter(size.head_dim)}


def _own_norm_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    vectors = {name: draw.parameter(size.width) for name in ("x_bias", "weight")}
    return {"x": draw.normal(size.tokens, size.width), **vectors}


def _offset_rms_norm(x, x_bias, weight, *, impl="auto") -> Tensor:
    return rms_norm(x, 1.0 + weight.float(), x_bias=x_bias, impl=impl)


def _plain_offset_rms_norm(x, x_bias, weight) -> Tensor:
    """Multiplies by 1 + weight before it rounds, as Gemma's norm does."""
    normalised = F.rms_norm(widened(x + x_bias), weight.shape, eps=1e-6)
    return (normalised * (1.0 + widened(weight))).to(x.dtype)


declare_case(
    rms_norm,
    _head_norm_inputs,
    lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
    "of each head",
)
declare_case(
    rms_norm,
    _own_norm_inputs,
    _plain_offset_rms_norm,
    "of a sublayer's output, 1 + weight",
    ours=_offset_rms_norm,
)
