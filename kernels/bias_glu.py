"""act(x_a + b_a) * (x_b + b_b) for the halves x_a and x_b of each row, and its backward with the bias gradient.

Tiling: one program takes ROWS rows of BLOCK columns of both halves. A program of the backward takes many groups of ROWS
rows and keeps its partial bias gradient in registers. Bytes per element of y, 2-byte types: forward 6, backward 10.
Source: Shazeer 2020, arXiv:2002.05202.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels import activation
from fastenc.kernels.activation import gate, slope
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.launch import tunable
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _halves(x_ptr, bias_ptr, row, column, mask, width, HAS_BIAS: tl.constexpr):
    """Both halves with their bias, in float32."""
    pointers = x_ptr + row.to(tl.int64) * (2 * width) + column
    a = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(pointers + width, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        inside = column < width
        a += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(bias_ptr + width + column, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit(do_not_specialize=["rows"])
def _bias_glu_fwd_kernel(
    x_ptr,  # (rows, 2 * width)
    bias_ptr,  # (2 * width,)
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
    a, b = _halves(x_ptr, bias_ptr, row, column, mask, width, HAS_BIAS)
    y = a * gate(a, ACTIVATION, NARROW) * b
    tl.store(y_ptr + row.to(tl.int64) * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _bias_glu_bwd_kernel(
    dy_ptr,  # (rows, width)
    x_ptr,  # (rows, 2 * width)
    bias_ptr,  # (2 * width,)
    dx_ptr,  # (rows, 2 * width)
    partial_ptr,  # (programs, 2 * width), float32
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    dbias_a = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias_b = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (column < width)
        a, b = _halves(x_ptr, bias_ptr, row, column, mask, width, HAS_BIAS)
        index = row.to(tl.int64) * width + column
        dy = tl.load(dy_ptr + index, mask=mask, other=0.0).to(tl.float32)
        g = gate(a, ACTIVATION, NARROW)
        da = dy * b * slope(a, g, ACTIVATION, NARROW)
        db = dy * a * g
        target = dx_ptr + row.to(tl.int64) * (2 * width) + column
        tl.store(target, da.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(target + width, db.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias_a += da
        dbias_b += db
    if HAS_BIAS:
        target = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * width) + column
        tl.store(target, tl.sum(dbias_a, 0)[None, :], mask=column < width)
        tl.store(target + width, tl.sum(dbias_b, 0)[None, :], mask=column < width)


@tunable("bias_glu", ROWS=(1, 2, 4, 8), BLOCK=(256, 512, 1024), num_warps=(2, 4, 8))
def config(width: int) -> dict:
    """Launch parameters for halves of ``width`` columns, where no table has better ones."""
    block = min(1024, triton.next_power_of_2(width))
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": 4}


compiled_keys = activation.compiled_keys


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel = _bias_glu_bwd_kernel if key["backward"] else _bias_glu_fwd_kernel
    return activation.launched(key, kernel, ("erf", "tanh", "silu"))


def bias_glu_forward(x: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], width))
    if not y.numel():
        return y
    rows, launch = y.numel() // width, config(width, like=x, backward=False)
    grid = (triton.cdiv(rows, launch["ROWS"]), triton.cdiv(width, launch["BLOCK"]))
    run(
        _bias_glu_fwd_kernel,
        grid,
        x,
        x if bias is None else bias.contiguous(),
        y,
        rows,
        width,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        NARROW=x.element_size() == 2,
        **launch,
    )
    return y


def bias_glu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, activation: int
) -> tuple[Tensor, Tensor]:
    """(dx, dbias float32 (2 * width,), which is empty without a bias)."""
    dy, x = dy.contiguous(), x.contiguous()
    width = x.shape[-1] // 2
    dx = torch.empty_like(x)
    columns = 2 * width if bias is not None else 0
    rows = dy.numel() // width if width else 0
    if not rows:
        return dx, torch.zeros(columns, dtype=torch.float32, device=x.device)
    launch = config(width, like=x, backward=True)
    # The number of programs sets the order of the sums. It depends on the shape and the kind of device alone.
    programs = min(persistent_programs(x.device, 2), triton.cdiv(rows, launch["ROWS"]))
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    run(
        _bias_glu_bwd_kernel,
        (programs, triton.cdiv(width, launch["BLOCK"])),
        dy,
        x,
        x if bias is None else bias.contiguous(),
        dx,
        partial,
        rows,
        width,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        NARROW=x.element_size() == 2,
        **launch,
    )
    return dx, partial.sum(0)
