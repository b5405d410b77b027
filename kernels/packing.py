"""Packed rows written into a padded batch, together with the padding, in one pass.

    out[p] = values[t] if indices[t] == p for some t, else padding_value

Tiling: one program writes ROWS padded rows. It finds their packed rows by binary search in the ascending indices, so no
inverse table is needed. It copies BLOCK columns at a time.

Bytes: reads values, writes out. Finding a row takes log2(total_tokens) reads of indices, which come from the cache.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["total_tokens", "padded_rows", "bits"])
def _unpack_kernel(
    values_ptr,  # (total_tokens, width)
    indices_ptr,  # (total_tokens,), int64, ascending
    out_ptr,  # (padded_rows, width)
    total_tokens,
    padded_rows,
    width,
    bits,  # of total_tokens
    padding_value,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    below = tl.zeros([ROWS], tl.int32)  # how many indices are below the row's
    for bit in tl.range(0, bits):
        candidate = below + (1 << (bits - 1 - bit))
        inside = candidate <= total_tokens
        index = tl.load(indices_ptr + candidate - 1, mask=inside, other=0)
        below = tl.where(inside & (index < row_index), candidate, below)
    inside = below < total_tokens
    real = inside & (tl.load(indices_ptr + below, mask=inside, other=0) == row_index)
    source = values_ptr + below.to(tl.int64)[:, None] * width
    target = out_ptr + row_index[:, None] * width
    for start in tl.range(0, width, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        mask = column < width
        row = tl.load(source + column, mask=real[:, None] & mask, other=0.0).to(tl.float32)
        row = tl.where(real[:, None], row, padding_value)
        mask = (row_index < padded_rows)[:, None] & mask
        tl.store(target + column, row.to(out_ptr.dtype.element_ty), mask=mask)


def config(width: int) -> dict:
    """Launch parameters; not tuned on a device yet. A program copies 2,048 elements at a time."""
    block = min(256, triton.next_power_of_2(width))
    return {"ROWS": min(64, 2048 // block), "BLOCK": block, "num_warps": 4}


def unpack(values: Tensor, indices: Tensor, padded_rows: int, padding_value: float) -> Tensor:
    """(padded_rows, width), dtype of values."""
    values, indices = values.contiguous(), indices.contiguous()
    total_tokens, width = values.shape
    out = torch.empty((padded_rows, width), dtype=values.dtype, device=values.device)
    if out.numel():
        launch = config(width)
        grid = (triton.cdiv(padded_rows, launch["ROWS"]),)
        bits = total_tokens.bit_length()
        run(
            _unpack_kernel,
            grid,
            values,
            indices,
            out,
            total_tokens,
            padded_rows,
            width,
            bits,
            padding_value,
            **launch,
        )
    return out
