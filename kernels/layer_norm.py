"""LayerNorm and RMSNorm of residual + dropout(x + x_bias), forward and backward.

    y = (h - mean(h)) * rstd * weight + bias
    dh = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_sum,  g = dy * weight

`dresidual_sum` is the gradient of h, if h is a result too.

Tiling: one program holds ROWS rows in registers. Each row is CHUNKS chunks of CHUNK columns, a power of two
(768 = 3 x 256), so no lane is idle. A width without such a division takes one masked chunk. Up to 1,024 columns a warp
has whole rows, so sums over a row need no barrier.

Bytes per element, 2-byte types: forward 4 to 8 (x, y, and if present residual and h), backward 6 to 10.
Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
"""

import torch
import triton
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.dropout import threshold_and_scale
from fastenc.kernels.layer_norm_backward import layer_norm_bwd_kernel
from fastenc.kernels.layer_norm_config import config
from fastenc.kernels.layer_norm_forward import layer_norm_fwd_kernel
from fastenc.kernels.layer_norm_sums import sums_over_programs
from fastenc.kernels.run import run
from torch import Tensor


def layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    rms: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, h, mean, rstd) as the op fastenc::layer_norm_fwd returns them."""
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    fused = residual is not None or x_bias is not None or rng_state is not None
    y = torch.empty_like(x)
    h = torch.empty_like(x) if save and fused else x.new_empty((0,))
    mean, rstd = (x.new_empty((rows if save else 0,), dtype=torch.float32) for _ in range(2))
    if not rows:
        return y, h, mean, rstd
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = config(width, x.element_size(), False, like=x, dropout=threshold > 0)
    some = lambda tensor: x if tensor is None else tensor.contiguous()
    run(
        layer_norm_fwd_kernel,
        (triton.cdiv(rows, launch["ROWS"]),),
        x,
        some(residual),
        some(x_bias),
        some(weight),
        some(bias),
        y,
        h,
        mean,
        rstd,
        some(rng_state),
        rows,
        eps,
        threshold,
        drop_scale,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        HAS_X_BIAS=x_bias is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_DROPOUT=threshold > 0,
        SAVE_H=save and fused,
        SAVE_STATISTICS=save,
        RMS=rms,
        **launch,
    )
    return y, h, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    dresidual_sum: Tensor | None,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    rms: bool,
    wants_affine: bool,
    wants_x_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dh, dx, dweight, dbias, dx_bias) as the op fastenc::layer_norm_bwd returns them."""
    dy = dy.contiguous()
    width = h.shape[-1]
    rows = h.numel() // width if width else 0
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = dict(config(max(1, width), h.element_size(), True, like=h, dropout=threshold > 0))
    # The number of programs sets the order of the sums. It depends on the shape and the kind of device alone.
    max_programs = persistent_programs(h.device, launch.pop("PROGRAMS"))
    programs = max(1, min(max_programs, triton.cdiv(rows, launch["ROWS"])))
    dh = torch.empty_like(h)
    dx = torch.empty_like(h) if rng_state is not None else h.new_empty((0,))
    partial = torch.empty((programs, 3, width), dtype=torch.float32, device=h.device)
    if rows:
        run(
            layer_norm_bwd_kernel,
            (programs,),
            dy,
            h if dresidual_sum is None else dresidual_sum.contiguous(),
            h,
            mean,
            rstd,
            h if weight is None else weight.contiguous(),
            dh,
            dx,
            partial,
            h if rng_state is None else rng_state,
            rows,
            threshold,
            drop_scale,
            WIDTH=width,
            HAS_WEIGHT=weight is not None,
            HAS_DROPOUT=threshold > 0,
            HAS_DRESIDUAL_SUM=dresidual_sum is not None,
            WANTS_AFFINE=wants_affine,
            WANTS_X_BIAS=wants_x_bias,
            RMS=rms,
            **launch,
        )
        if rng_state is not None and not threshold:
            dx.copy_(dh)
    dweight, dbias, dx_bias = sums_over_programs(partial, rows, wants_affine, wants_x_bias)
    return dh, dx, dweight, dbias, dx_bias
