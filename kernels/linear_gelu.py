"""gelu(x W^T + b) as one matrix product, and the product of its backward; activation.py has gelu and its slope.

    forward:  u = x W^T + b, y = gelu(u)
    backward: du = (dy V) * gelu'(u), where y V^T is the next layer; the gradient of b is du's column sums

Tiling: one program computes BLOCK_M rows and BLOCK_N columns. Programs that run at the same time share rows of x and
W in the L2 cache: they are numbered in groups of GROUP blocks of rows. The gradient of b is summed over a block's rows
in registers, and over the blocks in order.

Bytes per element of u beside the products' operands, 2-byte types: forward 4, backward 4. Separate passes move 4 and 6
more. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.activation import GELU, gate, slope
from fastenc.kernels.launch import tunable
from fastenc.kernels.matrix_product import grouped_tile, product_tile
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _linear_gelu_fwd_kernel(
    x_ptr,  # (rows, inner)
    weight_ptr,  # (width, inner)
    bias_ptr,  # (width,)
    y_ptr,  # (rows, width)
    u_ptr,  # (rows, width)
    rows,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    down, across = grouped_tile(rows, width, BLOCK_M, BLOCK_N, GROUP)
    row = down * BLOCK_M + tl.arange(0, BLOCK_M)
    column = across * BLOCK_N + tl.arange(0, BLOCK_N)
    u = product_tile(
        x_ptr, weight_ptr, row, column, rows, width, inner, True, BLOCK_K, EVEN, "ieee"
    )
    u += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    index = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(u_ptr + index, u.to(u_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + index, (u * gate(u, GELU, True)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _linear_gelu_bwd_kernel(
    dy_ptr,  # (rows, inner)
    weight_ptr,  # (inner, width)
    u_ptr,  # (rows, width)
    du_ptr,  # (rows, width)
    partial_ptr,  # (row blocks, width), float32
    rows,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    down, across = grouped_tile(rows, width, BLOCK_M, BLOCK_N, GROUP)
    row = down * BLOCK_M + tl.arange(0, BLOCK_M)
    column = across * BLOCK_N + tl.arange(0, BLOCK_N)
    du = product_tile(
        dy_ptr, weight_ptr, row, column, rows, width, inner, False, BLOCK_K, EVEN, "ieee"
    )
    index = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    u = tl.load(u_ptr + index, mask=mask, other=0.0).to(tl.float32)
    du *= slope(u, gate(u, GELU, True), GELU, True)
    tl.store(du_ptr + index, du.to(du_ptr.dtype.element_ty), mask=mask)
    sums = tl.sum(tl.where((row < rows)[:, None], du, 0.0), 0)
    tl.store(partial_ptr + down.to(tl.int64) * width + column, sums, mask=column < width)


@tunable(
    "linear_gelu",
    candidates=(
        {"BLOCK_N": 256, "num_stages": 3},
        {"BLOCK_M": 64, "BLOCK_N": 256},
        {"BLOCK_M": 64, "num_warps": 4, "num_stages": 4},
    ),
    BLOCK_M=(64, 128),
    BLOCK_N=(64, 128, 256),
    BLOCK_K=(32, 64, 128),
    GROUP=(4, 8, 16),
    num_warps=(4, 8),
    num_stages=(2, 3, 4),
)
def config(width: int, inner: int, backward: bool) -> dict:
    """Launch parameters where no table has better ones. Two warp groups of 64 rows each, as wgmma wants."""
    return {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "GROUP": 8,
        "num_warps": 8,
        "num_stages": 3,
    }


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries whose launches a test compiles ahead of time."""
    for (width, inner), backward in product(((3072, 768), (1536, 384)), (False, True)):
        yield {"width": width, "inner": inner, "backward": backward, "dtype": "bfloat16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernel that an entry with this key launches."""
    yield (
        "",
        _linear_gelu_bwd_kernel if key["backward"] else _linear_gelu_fwd_kernel,
        {"EVEN": True},
    )


def linear_gelu_forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(gelu(u), u), u = x weight^T + bias, for x (rows, inner), weight (width, inner), bias (width,)."""
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty(x.shape[0], weight.shape[0])
    u = torch.empty_like(y)
    launch = config(weight.shape[0], x.shape[1], False, like=x)
    _launch(_linear_gelu_fwd_kernel, launch, x.shape[1], x, weight, bias.contiguous(), y, u)
    return y, u


def linear_gelu_backward(dy: Tensor, weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """((dy weight) * gelu'(u), its column sums in float32), for dy (rows, inner), weight (inner, width), u."""
    dy, weight, u = dy.contiguous(), weight.contiguous(), u.contiguous()
    (rows, width), inner = u.shape, dy.shape[1]
    du = torch.empty_like(u)
    launch = config(width, inner, True, like=u)
    blocks = triton.cdiv(rows, launch["BLOCK_M"])
    partial = torch.empty((blocks, width), dtype=torch.float32, device=u.device)
    _launch(_linear_gelu_bwd_kernel, launch, inner, dy, weight, u, du, partial)
    return du, partial.sum(0)


def _launch(kernel, launch: dict, inner: int, *tensors: Tensor) -> None:
    """``tensors``: the kernel's, of which the fourth is (rows, width)."""
    rows, width = tensors[3].shape
    programs = triton.cdiv(rows, launch["BLOCK_M"]) * triton.cdiv(width, launch["BLOCK_N"])
    if programs:
        even = inner % launch["BLOCK_K"] == 0
        run(kernel, (programs,), *tensors, rows, width, inner, EVEN=even, **launch)
