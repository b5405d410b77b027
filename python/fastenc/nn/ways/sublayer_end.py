"""What the fused sublayers have in common: they end with Norm(residual + dropout(OwnNorm(y + x_bias)))."""

import torch
from torch import Tensor

from fastenc.nn.layer_spec import NormSpec
from fastenc.ops import checks


def end_sublayer(
    ctx,
    y: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    own_weight: Tensor | None,
    norm: tuple[NormSpec, bool],
    dropout: tuple[float, Tensor | None],
):
    """The sublayer's result, and the tensors that :func:`end_sublayer_backward` needs.

    Args:
        own_weight: of the norm of the sublayer's output, or None without that norm.
        norm: (description, whether the layer is pre-norm).
        dropout: (probability, seed and offset of the mask or None to draw them).
    Returns: (y, with pre-norm (y, the sum inside the norm); the tensors).
    """
    spec, pre_norm = norm
    is_rms = spec.norm_type == "rms"
    dropout_p, rng_state = dropout[0], mask_state(y, *dropout)
    ctx.norm, ctx.dropout_p = spec, dropout_p
    own: tuple[Tensor | None, ...] = (None,) * 4
    if own_weight is not None:
        x, changed = y, x_bias is not None
        y, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
            x, None, x_bias, own_weight, None, None, 0.0, spec.eps, is_rms, True
        )
        own, x_bias = (h if changed else x, mean, rstd, own_weight), None
    checks.check_like("encoder_layer", "residual", residual, y)
    for name, value in (("x_bias", x_bias), ("weight", weight), ("bias", bias)):
        checks.check_vector("encoder_layer", name, value, y)
    y, h, mean, rstd = torch.ops.fastenc.layer_norm_fwd(
        y, residual, x_bias, weight, bias, rng_state, dropout_p, spec.eps, is_rms, True
    )
    return (y, h) if pre_norm else y, (h, mean, rstd, weight, rng_state, *own)


def end_sublayer_backward(ctx, dy: Tensor | None, dsum: Tensor | None, saved, needs):
    """(gradient of the residual, gradient of the sublayer's output, (gradients of x_bias, weight, bias, own weight)).

    Without dropout the first two are the same tensor. So accumulate into the residual's gradient only after the last
    use of the other.
    """
    h, mean, rstd, weight, rng_state, *own = saved
    needs_x_bias, needs_weight, needs_bias, needs_own = needs
    has_own, is_rms = own[0] is not None, ctx.norm.norm_type == "rms"
    dy = torch.zeros_like(h) if dy is None else dy
    dh, dx, dweight, dbias, dx_bias = torch.ops.fastenc.layer_norm_bwd(
        dy, dsum, h, mean, rstd, weight, rng_state, ctx.dropout_p, is_rms,
        needs_weight or needs_bias, needs_x_bias and not has_own,
    )  # fmt: skip
    dprojected, down = dh if rng_state is None else dx, None
    if has_own:
        dprojected, _, down, _, dx_bias = torch.ops.fastenc.layer_norm_bwd(
            dprojected, None, *own, None, 0.0, is_rms, needs_own, needs_x_bias
        )
    parameters = (
        dx_bias if needs_x_bias else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        down if needs_own else None,
    )
    return dh, dprojected, parameters


def mask_state(x: Tensor, dropout_p: float, state: Tensor | None) -> Tensor | None:
    """Seed and offset of the dropout mask, drawn if ``state`` is None; None without dropout."""
    checks.check_dropout("encoder_layer", dropout_p)
    return checks.mask_rng_state("encoder_layer", state, dropout_p, x)


def dtypes_of(*tensors: Tensor | None) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def cast_gradients(gradients, dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
    """The gradients in the given dtypes; those that differ are cast in one call."""
    cast = list(gradients)
    others = [i for i, g in enumerate(cast) if g is not None and g.dtype != dtypes[i]]
    copies = [torch.empty_like(cast[i], dtype=dtypes[i]) for i in others]
    if copies:
        torch._foreach_copy_(copies, [cast[i] for i in others])
    for i, copy in zip(others, copies, strict=True):
        cast[i] = copy
    return cast
