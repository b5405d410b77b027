"""Rotary position embedding of packed sequences, and its gradient, which is the rotation by the negative angles.

    y[d] = x[d] cos - x[d + half] sin,  y[d + half] = x[d + half] cos + x[d] sin;  the rest of a head is copied

Tiling: one program is (block of ROWS tokens, sequence, head). Blocks past a sequence's end exit at once, so the grid
depends on max_seqlen only. A pair is read before it is written, so x may be rotated in place.

Bytes: reads x, writes y. The table is read once; the other heads' reads come from the cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["blocks"])
def _rotary_kernel(
    x_ptr,  # element (token, head, d) at token * stride_token + head * stride_head + d
    y_ptr,  # the same with its strides
    table_ptr,  # (positions, 2 * HALF), float32: cosines, then sines
    cu_seqlens_ptr,  # (batch+1,), int32
    blocks,
    stride_token,
    stride_head,
    stride_y_token,
    stride_y_head,
    HALF: tl.constexpr,
    REST: tl.constexpr,  # elements to copy
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    sequence, head = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    position = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS))[:, None]
    token = (first + position).to(tl.int64)
    x_row = x_ptr + token * stride_token + head * stride_head
    y_row = y_ptr + token * stride_y_token + head * stride_y_head
    d = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (position < length) & (d < HALF)
    angles = table_ptr + position.to(tl.int64) * (2 * HALF) + d
    cosine = tl.load(angles, mask=mask, other=0.0)
    sine = tl.load(angles + HALF, mask=mask, other=0.0)
    if INVERSE:
        sine = -sine
    a = tl.load(x_row + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_row + HALF + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_row + d, (a * cosine - b * sine).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_row + HALF + d, (b * cosine + a * sine).to(y_ptr.dtype.element_ty), mask=mask)
    if REST:
        d = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (position < length) & (d < 2 * HALF + REST)
        tl.store(y_row + d, tl.load(x_row + d, mask=mask, other=0.0), mask=mask)


def config(rotary_dim: int) -> dict:
    """Launch parameters; not tuned on a device yet. A program has about 2,048 elements."""
    block = triton.next_power_of_2(rotary_dim // 2)
    return {"BLOCK_HALF": block, "ROWS": max(1, min(64, 1024 // block)), "num_warps": 4}


def rotary(x: Tensor, table: Tensor, cu_seqlens: Tensor, max_seqlen: int, inverse: bool) -> Tensor:
    """x rotated, or with ``inverse`` rotated back, as a new contiguous tensor (tokens, heads, head_dim)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(y, x, table, cu_seqlens, max_seqlen, inverse)
    return y


def rotate_into(
    y: Tensor, x: Tensor, table: Tensor, cu_seqlens: Tensor, max_seqlen: int, inverse: bool
) -> None:
    """Write the result into y, which has x's shape or is x itself; the last stride of y must be 1."""
    x = x if x.stride(2) == 1 else x.contiguous()
    half = table.shape[1] // 2
    launch = config(2 * half)
    blocks, batch = triton.cdiv(max_seqlen, launch["ROWS"]), cu_seqlens.shape[0] - 1
    grid = (blocks * batch, x.shape[1])
    if 0 in grid:
        return
    rest = 0 if y is x else x.shape[2] - 2 * half
    run(
        _rotary_kernel,
        grid,
        x,
        y,
        table.contiguous(),
        cu_seqlens.contiguous(),
        blocks,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        HALF=half,
        REST=rest,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)),
        INVERSE=inverse,
        **launch,
    )


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    for rotary_dim, head_dim in ((32, 32), (64, 64), (96, 96), (128, 128), (32, 64)):
        half, rest = rotary_dim // 2, head_dim - rotary_dim
        constants = {"HALF": half, "REST": rest, "BLOCK_REST": max(1, rest), "INVERSE": True}
        yield f"rotary {rotary_dim} of {head_dim}", _rotary_kernel, constants | config(rotary_dim)
