"""Tables of positions by distance: their rows for each distance, and their gradients from sums by distance.

    out[r] = the table's row for distance r - origin

Tiling: one program takes ROWS distances and BLOCK columns.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.index_sum import index_sum
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["origin", "reach", "count"])
def _disentangled_expand_kernel(
    position_ptr,  # (rows, width)
    slots_ptr,  # (2 reach + 1,), int32
    out_ptr,  # (count, width)
    stride_row,  # of the table
    origin,
    reach,
    count,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = the table's row for distance r - origin."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    distance = tl.minimum(tl.maximum(row - origin, -reach), reach)
    slot = tl.load(slots_ptr + distance + reach).to(tl.int64)
    mask = (row < count)[:, None] & (column < width)[None, :]
    values = tl.load(
        position_ptr + slot[:, None] * stride_row + column[None, :], mask=mask, other=0.0
    )
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + column[None, :], values, mask=mask)


def config(width: int) -> dict:
    """Launch parameters; not tuned on a device yet."""
    return {"ROWS": 4, "BLOCK": min(1024, triton.next_power_of_2(width)), "num_warps": 4}


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    yield "table by distance", _disentangled_expand_kernel, config(768)


def expand_table(table: Tensor | None, slots: Tensor, origin: int) -> Tensor | None:
    """(2 origin, H, D): the table's rows for the distances from -origin on."""
    if table is None:
        return None
    if table[0].stride() != (table.shape[2], 1):
        table = table.contiguous()
    out = table.new_empty((2 * origin, *table.shape[1:]))
    count, width = out.shape[0], out[0].numel()
    launch = config(width)
    grid = (triton.cdiv(count, launch["ROWS"]), triton.cdiv(width, launch["BLOCK"]))
    sizes = (table.stride(0), origin, slots.shape[0] // 2, count, width)
    run(_disentangled_expand_kernel, grid, table, slots.contiguous(), out, *sizes, **launch)
    return out


def table_gradient(partial: Tensor, table: Tensor, slots: Tensor, descending: bool) -> Tensor:
    """The table's gradient, its shape and dtype: the sums of the distances that share a row.

    partial: (chunks, distances, H, D), float32. descending: whether its distances run from the greatest to the least.
    """
    count, reach = partial.shape[1], slots.shape[0] // 2
    distance = torch.arange(-count // 2, count // 2, device=slots.device)
    if descending:
        distance = -distance
    index = slots[distance.clamp(-reach, reach) + reach].long()
    sums = index_sum(partial.sum(0).flatten(1), index, table.shape[0], 0, -1)
    return sums.view(table.shape).to(table.dtype)
