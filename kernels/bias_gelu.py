"""gelu(x + bias) and its backward with the bias gradient. activation.py has the activations and their slopes.

Tiling: one program takes ROWS rows of BLOCK columns. A program of the backward takes many groups of ROWS rows and keeps
its partial bias gradient in registers.
Bytes per element, 2-byte types: forward 4, backward 6. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels import activation
from fastenc.kernels.activation import GELU, GELU_TANH, gate, slope
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.launch import tunable
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu_fwd_kernel(
    x_ptr,  # (rows, width)
    bias_ptr,  # (width,)
    y_ptr,  # (rows, width)
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < width)
    index = row.to(tl.int64) * width + column
    u = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + index, (u * gate(u, ACTIVATION, NARROW)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu_bwd_kernel(
    dy_ptr,  # (rows, width)
    x_ptr,  # (rows, width)
    bias_ptr,  # (width,)
    dx_ptr,  # (rows, width)
    partial_ptr,  # (programs, width), float32
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (column < width)
        index = row.to(tl.int64) * width + column
        u = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += bias
        dx = tl.load(dy_ptr + index, mask=mask, other=0.0).to(tl.float32)
        dx *= slope(u, gate(u, ACTIVATION, NARROW), ACTIVATION, NARROW)
        tl.store(dx_ptr + index, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias += dx
    if HAS_BIAS:
        target = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
        tl.store(target, tl.sum(dbias, 0)[None, :], mask=column < width)


@tunable("bias_gelu", ROWS=(1, 2, 4, 8), BLOCK=(256, 512, 1024), num_warps=(2, 4, 8))
def config(width: int) -> dict:
    """Launch parameters where no table has better ones."""
    block = min(1024, triton.next_power_of_2(width))
    return {"ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": 4}


compiled_keys = activation.compiled_keys


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel = _bias_gelu_bwd_kernel if key["backward"] else _bias_gelu_fwd_kernel
    return activation.launched(key, kernel, ("erf", "tanh"))


def _variant(x: Tensor, tanh: bool) -> dict:
    return {"ACTIVATION": (GELU_TANH if tanh else GELU).value, "NARROW": x.element_size() == 2}


def bias_gelu_forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _forward_into(y, x, bias, tanh)
    return y


def bias_gelu_in_place(x: Tensor, bias: Tensor | None, tanh: bool) -> None:
    """x, which must be contiguous, becomes gelu(x + bias)."""
    _forward_into(x, x, bias, tanh)


def _forward_into(y: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> None:
    width = x.shape[-1]
    if not x.numel():
        return
    rows, launch = x.numel() // width, config(width, like=x, backward=False)
    grid = (triton.cdiv(rows, launch["ROWS"]), triton.cdiv(width, launch["BLOCK"]))
    run(
        _bias_gelu_fwd_kernel,
        grid,
        x,
        x if bias is None else bias.contiguous(),
        y,
        rows,
        width,
        HAS_BIAS=bias is not None,
        **_variant(x, tanh),
        **launch,
    )


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dbias float32 (width,), which is empty without a bias)."""
    dy, x = dy.contiguous(), x.contiguous()
    width = x.shape[-1]
    dx = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    if not rows:
        return dx, torch.zeros(
            width if bias is not None else 0, dtype=torch.float32, device=x.device
        )
    launch = config(width, like=x, backward=True)
    # The number of programs sets the order of the sums. It depends on the shape and the kind of device alone.
    programs = min(persistent_programs(x.device, 2), triton.cdiv(rows, launch["ROWS"]))
    partial = torch.empty(
        (programs, width if bias is not None else 0), dtype=torch.float32, device=x.device
    )
    grid = (programs, triton.cdiv(width, launch["BLOCK"]))
    run(
        _bias_gelu_bwd_kernel,
        grid,
        dy,
        x,
        x if bias is None else bias.contiguous(),
        dx,
        partial,
        rows,
        width,
        HAS_BIAS=bias is not None,
        **_variant(x, tanh),
        **launch,
    )
    return dx, partial.sum(0)
