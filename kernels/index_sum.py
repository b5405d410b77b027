"""Sums of the rows that share an index, for a few indices: the gradient of a table of positions or token types.

    out[r] = sum of rows[i] over index[i] + offset = r, zero at padding

Tiling: one program computes INDICES rows and BLOCK columns of the result. It reads TOKENS input rows at a time and
multiplies them by a one-hot matrix of their indices. The products with 0 and 1 are exact, so matrix instructions
compute sums in float32. The tokens are split among programs, whose sums are added in order. Nothing is sorted, and
there are no atomics.

Bytes: the input rows once for every INDICES rows of the result; all but the first reading come from the cache. FLOPs:
2 * size * count * width. Tables of many rows are therefore summed in sorted order instead (add_rows.py).
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

# Two for each of an H100's multiprocessors. The number is the same on every GPU, so that the sums are.
PROGRAMS = 264


@triton.jit(do_not_specialize=["count", "size", "offset", "padding"])
def _index_sum_kernel(
    rows_ptr,  # (count, width)
    indices_ptr,  # (count,), int64
    partial_ptr,  # (splits, size, width), float32
    count,
    size,
    offset,
    padding,
    width,
    INDICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    target = tl.program_id(0) * INDICES + tl.arange(0, INDICES)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.where(target == padding, -1, target)
    sums = tl.zeros([INDICES, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(2) * TOKENS, count, tl.num_programs(2) * TOKENS):
        token = first + tl.arange(0, TOKENS)
        index = tl.load(indices_ptr + token, mask=token < count, other=0).to(tl.int32) + offset
        element = token.to(tl.int64)[:, None] * width + column[None, :]
        mask = (token < count)[:, None] & (column < width)[None, :]
        rows = tl.load(rows_ptr + element, mask=mask, other=0.0)
        taken = (wanted[:, None] == index[None, :]).to(rows.dtype)
        sums = tl.dot(taken, rows, sums, input_precision=PRECISION)
    element = (tl.program_id(2) * size + target).to(tl.int64)[:, None] * width + column[None, :]
    tl.store(partial_ptr + element, sums, mask=(target < size)[:, None] & (column < width)[None, :])


def config(size: int, itemsize: int) -> dict:
    """Launch parameters; not tuned on a device yet.

    A wgmma instruction multiplies at least 64 rows. With 64 tokens, the three products of float32 spill on sm_80.
    """
    indices = 64 if size <= 64 or itemsize == 4 else 128
    tokens = 32 if itemsize == 4 else 64
    return {"INDICES": indices, "BLOCK": 64, "TOKENS": tokens, "num_warps": 4, "num_stages": 3}


def index_sum(rows: Tensor, index: Tensor, size: int, offset: int, padding: int) -> Tensor:
    """(size, width), dtype of rows; padding: a row of the result that stays 0, or -1."""
    rows, index = rows.contiguous(), index.contiguous().flatten()
    count, width = rows.shape
    if not rows.numel() or not size:
        return rows.new_zeros((size, width))
    launch = config(size, rows.element_size())
    blocks = triton.cdiv(size, launch["INDICES"]), triton.cdiv(width, launch["BLOCK"])
    splits = min(triton.cdiv(PROGRAMS, blocks[0] * blocks[1]), triton.cdiv(count, launch["TOKENS"]))
    partial = torch.empty((splits, size, width), dtype=torch.float32, device=rows.device)
    # TF32 keeps 11 bits of a factor. Three products keep all bits of float32.
    precision = "tf32x3" if rows.dtype == torch.float32 else "ieee"
    run(
        _index_sum_kernel,
        (*blocks, splits),
        rows,
        index,
        partial,
        count,
        size,
        offset,
        padding,
        width,
        PRECISION=precision,
        **launch,
    )
    return partial.sum(0).to(rows.dtype)
