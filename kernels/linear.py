"""x W^T + b with the same bits for a row of x alone, in any batch and at any place.

    y[t, n] = sum_k x[t, k] W[n, k] + b[n]

cuBLAS chooses tiles, and into how many parts it cuts the sum over k, by the number of rows. Here both are fixed: the
launch depends on the dtype only, and a program adds all k in blocks of BLOCK_K, in ascending order.

Tiling: one program computes BLOCK_M rows and BLOCK_N columns. Programs that run at the same time share rows of x and
W in the L2 cache: they are numbered in groups of GROUP blocks of rows.

Bytes: x, W and y once, if the L2 cache holds what the programs of a group share.
Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.matrix_product import grouped_tile, precision, product_tile
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,  # (rows, inner)
    weight_ptr,  # (width, inner)
    bias_ptr,  # (width,), or None
    y_ptr,  # (rows, width)
    rows,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    down, across = grouped_tile(rows, width, BLOCK_M, BLOCK_N, GROUP)
    row = down * BLOCK_M + tl.arange(0, BLOCK_M)
    column = across * BLOCK_N + tl.arange(0, BLOCK_N)
    y = product_tile(
        x_ptr, weight_ptr, row, column, rows, width, inner, True, BLOCK_K, EVEN, PRECISION
    )
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    index = row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=mask)


def config(itemsize: int) -> dict:
    """Launch parameters; not tuned on a device yet. 64 rows are one instruction of four warps (wgmma)."""
    wide = itemsize == 4
    tile = {"BLOCK_M": 64, "BLOCK_N": 64 if wide else 128, "BLOCK_K": 32 if wide else 64}
    return {**tile, "GROUP": 8, "num_warps": 4, "num_stages": 3}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias for x (rows, inner), weight (width, inner), bias (width,), all of one dtype."""
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty(x.shape[0], weight.shape[0])
    if y.numel():
        (rows, inner), width, launch = x.shape, weight.shape[0], config(x.element_size())
        programs = triton.cdiv(rows, launch["BLOCK_M"]) * triton.cdiv(width, launch["BLOCK_N"])
        run(
            _linear_kernel,
            (programs,),
            x,
            weight,
            None if bias is None else bias.contiguous(),
            y,
            rows,
            width,
            inner,
            EVEN=inner % launch["BLOCK_K"] == 0,
            PRECISION="tf32" if _in_tf32(x) else precision(x.element_size()),
            **launch,
        )
    return y


def _in_tf32(x: Tensor) -> bool:
    return x.element_size() == 4 and torch.backends.cuda.matmul.fp32_precision == "tf32"
