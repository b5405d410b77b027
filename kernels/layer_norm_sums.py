"""The sums of the norms' backward over all rows, from the partial sums of its programs.

Tiling: one program takes BLOCK columns of one of the sums, and the partial sums of ROWS programs at a time.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

# The partial sums of 264 programs, two for each of an H100's multiprocessors, take three turns, whose loads are all
# under way at once.
LAUNCH = {"ROWS": 128, "BLOCK": 32, "STAGES": 4, "num_warps": 8}


@triton.jit(do_not_specialize=["programs"])
def _add_programs_kernel(
    partial_ptr,  # (programs, 3, width), float32
    dweight_ptr,  # (width,), float32
    dbias_ptr,  # (width,), float32
    dx_bias_ptr,  # (width,), float32
    programs,
    width,
    FIRST: tl.constexpr,  # of the sums that are wanted
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    which = tl.program_id(1) + FIRST
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, programs, ROWS, num_stages=STAGES):
        program = first + tl.arange(0, ROWS)
        index = (program * 3 + which)[:, None] * width + column[None, :]
        mask = (program < programs)[:, None] & (column < width)[None, :]
        partial += tl.load(partial_ptr + index, mask=mask, other=0.0)
    sums = tl.sum(partial, 0)
    if which == 0:
        tl.store(dweight_ptr + column, sums, mask=column < width)
    elif which == 1:
        tl.store(dbias_ptr + column, sums, mask=column < width)
    else:
        tl.store(dx_bias_ptr + column, sums, mask=column < width)


def sums_over_programs(
    partial: Tensor, rows: int, wants_affine: bool, wants_x_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dweight, dbias, dx_bias), float32 (width,), or empty where they are not wanted.

    partial: (programs, 3, width), float32; without rows it holds nothing, and the sums are 0.
    """
    programs, _, width = partial.shape
    # Separate tensors: an op's results must not share memory.
    new = partial.new_empty if rows else partial.new_zeros
    sums = lambda wanted: new((width if wanted else 0,), dtype=torch.float32)
    dweight, dbias, dx_bias = sums(wants_affine), sums(wants_affine), sums(wants_x_bias)
    if rows and (wants_affine or wants_x_bias):
        first, last = 0 if wants_affine else 2, 3 if wants_x_bias else 2
        run(
            _add_programs_kernel,
            (triton.cdiv(width, LAUNCH["BLOCK"]), last - first),
            partial,
            dweight,
            dbias,
            dx_bias,
            programs,
            width,
            FIRST=first,
            **LAUNCH,
        )
    return dweight, dbias, dx_bias
