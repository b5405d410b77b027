"""Which block of tokens and which head a program of attention takes: on the device, and the grid on the host.

Blocks past a sequence's end exit at once. So a grid depends on max_seqlen only, and nothing is read back from the
device.
"""

import triton
import triton.language as tl
from torch import Tensor

TABLE_BLOCK = tl.constexpr(64)  # tokens of an entry of attention_blocks.py's tables


@triton.jit
def program(blocks_ptr, blocks, H: tl.constexpr, BLOCK: tl.constexpr):
    """(block of BLOCK tokens, sequence, head).

    From a table of blocks of TABLE_BLOCK tokens, all heads of a block beside each other; or, without one, in a grid of
    (blocks * batch, heads): only its first axis is longer than 65,535.
    """
    if blocks_ptr is None:
        return tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.program_id(1)
    else:
        EACH: tl.constexpr = max(1, TABLE_BLOCK // BLOCK)
        index = tl.program_id(0) // H
        entry = blocks_ptr + index // EACH * 2
        start = tl.load(entry + 1) * TABLE_BLOCK + index % EACH * BLOCK
        # Entries that share a larger block: the first has it, the others get one past every sequence's end.
        block = tl.where(start % BLOCK == 0, start // BLOCK, 2147483647 // BLOCK)
        return block, tl.load(entry), tl.program_id(0) % H


@triton.jit
def visible_blocks(
    row, length, before, after, BLOCK: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr
):
    """(first, end) of those of `length` rows that `SIZE` rows from `row` on can see; first is a multiple of BLOCK."""
    if WINDOW:
        first = tl.maximum(0, row - before) // BLOCK * BLOCK
        return first, tl.minimum(length, row + SIZE + after)
    return row * 0, length


def block_grid(
    blocks_table: Tensor | None, max_seqlen: int, block: int, arguments: dict, group: int = 1
) -> tuple[dict, tuple]:
    """(arguments, grid) of a kernel whose programs have ``block`` tokens and ``group`` heads of q each.

    blocks_table: by attention_blocks.py, or None for a grid over the longest sequence.
    """
    blocks, heads = triton.cdiv(max_seqlen, block), arguments["H"] // group
    of_grid = {"blocks_ptr": blocks_table, "blocks": blocks}
    if blocks_table is None:
        return of_grid, (blocks * (arguments["cu_seqlens_q_ptr"].shape[0] - 1), heads)
    return of_grid, (blocks_table.shape[0] * max(1, TABLE_BLOCK.value // block) * heads,)
