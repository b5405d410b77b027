"""Rows that are added to those rows of a table that their ids name: the gradients of embedding tables.

    table[ids[i] + offset] += rows[order[i]]

The ids are sorted and cut into windows of WINDOW. A chunk is what one id has in one window:

    sorted ids:  7 7 7 9 | 9 9 9 9 | 9 9 12 15    (windows of 4)
    chunks:      [7    ][9]  [9    ]  [9 ][12][15]

Tiling: one program sums BLOCK columns of one chunk. If its id has no other chunk, the program adds the sum to the
table's row. Otherwise ([CLS], [MASK], a token type) it stores the sum, and a second kernel adds up the id's chunks in
order. There are no atomics, and the order of the sums depends on the ids alone.

Bytes per element, 2-byte types: 2 of the rows, 4 of the table's rows that get a sum.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

WINDOW = 64  # the most rows that one program adds up


@triton.jit
def _add_row(table_ptr, row, row_sum, column, WIDTH: tl.constexpr):
    pointers = table_ptr + row * WIDTH + column
    old = tl.load(pointers, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(pointers, (old + row_sum).to(table_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["count", "offset", "padding"])
def _add_chunks_kernel(
    table_ptr,  # (table rows, width)
    rows_ptr,  # (count, width)
    ids_ptr,  # (count,), int64, sorted
    order_ptr,  # (count,), int64: ids[i] belongs to rows[order[i]]
    partial_ptr,  # (windows, 2, width), float32: of the id from the window before, and of that which continues
    count,
    offset,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    start = tl.program_id(0)
    token_id = tl.load(ids_ptr + start)
    begins = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1) != token_id
    if begins | (start % WINDOW == 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        window = start // WINDOW
        index = start + tl.arange(0, WINDOW)
        near = (index < count) & (index < (window + 1) * WINDOW)
        length = tl.sum((tl.load(ids_ptr + index, mask=near, other=-1) == token_id).to(tl.int32))
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in tl.range(0, length, ROWS):
            turn = first + tl.arange(0, ROWS)
            source = tl.load(order_ptr + start + turn, mask=turn < length, other=0)
            mask = (turn < length)[:, None] & (column < WIDTH)[None, :]
            address = rows_ptr + source[:, None] * WIDTH + column[None, :]
            sums += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        id_sum = tl.sum(sums, 0)
        after = start + length
        ends = tl.load(ids_ptr + after, mask=after < count, other=-1) != token_id
        if begins & ends:
            if token_id + offset != padding:
                _add_row(table_ptr, token_id + offset, id_sum, column, WIDTH)
        else:
            slot = 2 * window + (start % WINDOW != 0).to(tl.int32)
            tl.store(partial_ptr + slot.to(tl.int64) * WIDTH + column, id_sum, mask=column < WIDTH)


@triton.jit(do_not_specialize=["count", "offset", "padding"])
def _add_long_kernel(
    table_ptr,  # (table rows, width)
    ids_ptr,  # (count,), int64, sorted
    partial_ptr,  # (windows, 2, width), float32
    count,
    offset,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The program of a window adds up the id that begins in the window and continues in the next."""
    window = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = window * WINDOW
    after = start + WINDOW
    token_id = tl.load(ids_ptr + after - 1, mask=after < count, other=-1)
    goes_on = (after < count) & (tl.load(ids_ptr + after, mask=after < count, other=-1) == token_id)
    whole = tl.load(ids_ptr + start) == token_id
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1) == token_id
    if goes_on & (token_id + offset != padding) & ((whole & before) == 0):
        slot = 2 * window + (whole == 0).to(tl.int32)
        id_sum = tl.load(
            partial_ptr + slot.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0
        )
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        turn = window + 1 + tl.arange(0, ROWS)
        matches = ROWS
        while matches == ROWS:
            near = turn * WINDOW < count
            same = near & (tl.load(ids_ptr + turn * WINDOW, mask=near, other=-1) == token_id)
            address = partial_ptr + (2 * turn).to(tl.int64)[:, None] * WIDTH + column[None, :]
            mask = same[:, None] & (column < WIDTH)[None, :]
            sums += tl.load(address, mask=mask, other=0.0)
            matches = tl.sum(same.to(tl.int32))
            turn += ROWS
        _add_row(table_ptr, token_id + offset, id_sum + tl.sum(sums, 0), column, WIDTH)


def config(width: int) -> dict:
    """Launch parameters of _add_chunks_kernel; not tuned on a device yet."""
    return {"BLOCK": min(1024, triton.next_power_of_2(width)), "ROWS": 4, "num_warps": 4}


def config_long() -> dict:
    """Launch parameters of _add_long_kernel; not tuned on a device yet.

    It adds many chunks at a time, because one program adds up all chunks of a token type.
    """
    return {"BLOCK": 64, "ROWS": 64, "num_warps": 4}


def add_rows_in_place(
    table: Tensor, rows: Tensor, sorted_ids: Tensor, order: Tensor, offset: int, padding_idx: int
) -> None:
    """table[sorted_ids[i] + offset] += rows[order[i]], except in row padding_idx (-1: no such row).

    table must be contiguous.
    """
    count, width = rows.shape
    if not rows.numel():
        return
    windows, launch, launch_long = triton.cdiv(count, WINDOW), config(width), config_long()
    partial = torch.empty((windows, 2, width), dtype=torch.float32, device=rows.device)
    shared = {"WIDTH": width, "WINDOW": WINDOW}
    run(
        _add_chunks_kernel,
        (count, triton.cdiv(width, launch["BLOCK"])),
        table,
        rows,
        sorted_ids,
        order,
        partial,
        count,
        offset,
        padding_idx,
        **shared,
        **launch,
    )
    run(
        _add_long_kernel,
        (windows, triton.cdiv(width, launch_long["BLOCK"])),
        table,
        sorted_ids,
        partial,
        count,
        offset,
        padding_idx,
        **shared,
        **launch_long,
    )
