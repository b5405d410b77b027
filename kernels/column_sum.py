"""Sums of a matrix's columns in float32.

Tiling: one program takes BLOCK columns and every n-th group of ROWS rows. It keeps the columns' sums in registers and
writes them once. The programs' sums are then added in order. Bytes per element, 2-byte types: 2.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _column_sum_kernel(
    x_ptr,  # (rows, width)
    partial_ptr,  # (programs, width), float32
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & (column < width)
        sums += tl.load(x_ptr + row.to(tl.int64) * width + column, mask=mask, other=0.0)
    target = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(target, tl.sum(sums, 0)[None, :], mask=column < width)


def config() -> dict:
    """Launch parameters; not tuned on a device yet. BLOCK columns of a row fill whole cache lines."""
    return {"ROWS": 32, "BLOCK": 128, "num_warps": 4}


def column_sum(x: Tensor) -> Tensor:
    """(width,), float32."""
    x = x.contiguous()
    rows, width = x.shape
    if not x.numel():
        return torch.zeros(width, dtype=torch.float32, device=x.device)
    launch = config()
    columns = triton.cdiv(width, launch["BLOCK"])
    max_programs = triton.cdiv(persistent_programs(x.device, 4), columns)
    programs = min(max_programs, triton.cdiv(rows, launch["ROWS"]))
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    run(_column_sum_kernel, (programs, columns), x, partial, rows, width, **launch)
    return partial.sum(0)
