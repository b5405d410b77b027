"""Sums of the rows that share an index, for a few indices: the gradient of a table of positions or token types.

    out[r] = sum of rows[i] over index[i] + offset = r, zero at padding

Tiling: a program has INDICES rows of the result and BLOCK columns; it walks TOKENS rows at a time and multiplies them
by the matrix of zeros and ones that says which index each has. The products are exact, so these are sums in float32 by
matrix instructions. Nothing is sorted and nothing added atomically: the tokens are split among programs, whose sums are
added in order.

Bytes: rows once for each INDICES rows of the result, from the second time on out of the cache. FLOPs: 2 * size * count
* width, which is why tables of many rows are summed in sorted order instead (embedding_layer_norm.py).
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

# Two for each of an H100's multiprocessors, and the same on every GPU, so that the sums are the same.
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
    """Launch parameters; not tuned on a device yet. A wgmma multiplies 64 rows at least.

    float32's three products of 64 tokens spill on sm_80.
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
    # TF32 keeps 11 bits of a factor: three products keep all of float32's.
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
