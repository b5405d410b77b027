"""First token, mean or maximum of each packed sequence, forward and backward.

Tiling: one program is (sequence, block of BLOCK columns). It reads the sequence ROWS tokens at a time and combines its
ROWS partial results once, at the end. The backward writes the rows of the sequence in the same order. Grids depend on
shapes only; the length of a sequence is read on the device.

Bytes: forward reads x, backward writes dx, total_tokens * hidden_size elements each. "cls" reads one row per sequence.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

CLS = tl.constexpr(0)
MEAN = tl.constexpr(1)
MAX = tl.constexpr(2)


@triton.jit
def _segment_pool_fwd_kernel(
    x_ptr,  # (total_tokens, width)
    cu_seqlens_ptr,  # (batch+1,), int32
    y_ptr,  # (batch, width)
    argmax_ptr,  # (batch, width), int32
    width,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_c = column < width
    base = x_ptr + first.to(tl.int64) * width
    target = sequence.to(tl.int64) * width + column
    if MODE == CLS:
        mask = column < tl.where(length > 0, width, 0)
        y = tl.load(base + column, mask=mask, other=0.0).to(tl.float32)
    else:
        offs_r = tl.arange(0, ROWS)
        # A maximum starts at its lane's first token, so that a lane of -infinity has an index too.
        lane = tl.zeros([ROWS, BLOCK], tl.float32)
        if MODE == MAX:
            lane += float("-inf")
        argmax_row = tl.zeros([ROWS, BLOCK], tl.int32) + offs_r[:, None]
        for start in tl.range(0, length, ROWS):
            row = (start + offs_r)[:, None]
            mask = (row < length) & mask_c[None, :]
            pointers = base + row.to(tl.int64) * width + column[None, :]
            if MODE == MEAN:
                lane += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            else:
                x = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
                better = (x > lane) | ((x != x) & (lane == lane))
                lane = tl.where(better, x, lane)
                argmax_row = tl.where(better, row, argmax_row)
        if MODE == MEAN:
            y = tl.sum(lane, 0) / tl.maximum(length, 1).to(tl.float32)
        else:
            nan = lane != lane
            any_nan = tl.max(nan.to(tl.int32), 0) > 0
            largest = tl.max(tl.where(nan, float("-inf"), lane), 0)
            reaches = tl.where(any_nan[None, :], nan, lane == largest[None, :])
            argmax = tl.min(tl.where(reaches, argmax_row, 2147483647), 0)
            y = tl.where(any_nan, float("nan"), tl.where(length > 0, largest, 0.0))
            tl.store(argmax_ptr + target, first + argmax, mask=mask_c)
    tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=mask_c)


@triton.jit
def _segment_pool_bwd_kernel(
    dy_ptr,  # (batch, width)
    argmax_ptr,  # (batch, width), int32
    cu_seqlens_ptr,  # (batch+1,), int32
    dx_ptr,  # (total_tokens, width)
    width,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask_c = column < width
    source = sequence.to(tl.int64) * width + column
    dy = tl.load(dy_ptr + source, mask=mask_c, other=0.0).to(tl.float32)
    if MODE == MEAN:
        dy = dy / tl.maximum(length, 1).to(tl.float32)
    # The one token of the sequence that takes a gradient.
    chosen = tl.zeros([1, BLOCK], tl.int32)
    if MODE == MAX:
        chosen = tl.load(argmax_ptr + source, mask=mask_c, other=0) - first
    for start in tl.range(0, length, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        dx = tl.where(row == chosen, dy, 0.0)
        if MODE == MEAN:
            dx = tl.zeros([ROWS, BLOCK], tl.float32) + dy
        pointers = dx_ptr + (first + row).to(tl.int64) * width + column
        tl.store(pointers, dx.to(dx_ptr.dtype.element_ty), mask=(row < length) & mask_c)


def config(width: int) -> dict:
    """Launch parameters; not tuned on a device yet. Blocks are narrow, because a batch has few sequences."""
    block = min(64, triton.next_power_of_2(width))
    return {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}


def segment_pool_forward(x: Tensor, cu_seqlens: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """(y (batch, width), argmax int32 (batch, width), which is empty unless the mode is the maximum)."""
    x, cu_seqlens = x.contiguous(), cu_seqlens.contiguous()
    batch, width = cu_seqlens.shape[0] - 1, x.shape[1]
    y = x.new_empty((batch, width))
    argmax = x.new_empty((batch, width) if mode == MAX.value else (0,), dtype=torch.int32)
    if y.numel():
        launch = config(width)
        grid = (batch, triton.cdiv(width, launch["BLOCK"]))
        run(_segment_pool_fwd_kernel, grid, x, cu_seqlens, y, argmax, width, MODE=mode, **launch)
    return y, argmax


def segment_pool_backward(
    dy: Tensor, argmax: Tensor, cu_seqlens: Tensor, total_tokens: int, mode: int
) -> Tensor:
    dy, cu_seqlens = dy.contiguous(), cu_seqlens.contiguous()
    batch, width = dy.shape
    dx = dy.new_empty((total_tokens, width))
    if dx.numel() and batch:
        launch = config(width)
        grid = (batch, triton.cdiv(width, launch["BLOCK"]))
        run(_segment_pool_bwd_kernel, grid, dy, argmax, cu_seqlens, dx, width, MODE=mode, **launch)
    return dx
