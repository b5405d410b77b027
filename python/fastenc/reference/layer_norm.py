"""LayerNorm and RMSNorm of residual + dropout(x + x_bias), in plain torch.

Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fastenc.reference.dropout import dropout_scales


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
) -> Any:
    h = _pre_norm(x, residual, x_bias, dropout_p, rng_state)
    centred = h - h.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # the first mean's rounding error
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = _affine(y, weight, bias, x.dtype)
    return (y, h.to(x.dtype)) if return_residual_sum else y


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
) -> Any:
    h = _pre_norm(x, residual, x_bias, dropout_p, rng_state)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = _affine(y, weight, None, x.dtype)
    return (y, h.to(x.dtype)) if return_residual_sum else y


def _pre_norm(x, residual, x_bias, dropout_p, rng_state):
    # Statistics are at least float32: low-precision inputs are widened first, as every kernel does.
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if x_bias is not None:
        h = h + x_bias.to(wide)
    if dropout_p > 0:
        rows = torch.arange(math.prod(x.shape[:-1]), device=x.device)
        scales = dropout_scales(rng_state, 0, rows, x.shape[-1], dropout_p)
        h = h * scales.view(x.shape).to(wide)
    if residual is not None:
        h = h + residual.to(wide)
    return h


def _affine(y, weight, bias, dtype):
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype)
