"""Tables of the blocks that attention's programs take, the longest sequences first, made on the device.

    all_blocks[row] = (sequence, index of the block in the sequence)
    long_blocks: the same, of the sequences with more than SHORT tokens

Tiling: one program per sequence. It reads the lengths of all sequences, LENGTHS at a time, and counts the blocks of the
sequences that precede its own. This count is the row of its first entry. Longer sequences precede shorter ones; equally
long ones keep their order. The number of blocks is known on the device only, so a table has a row for each block that
there can be. Unused rows name a block past every sequence's end, at which attention's programs exit.

Bytes: batch^2 offsets, which come from the cache.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.attention_grid import TABLE_BLOCK
from fastenc.kernels.attention_short_grid import LONGEST
from fastenc.kernels.run import run
from torch import Tensor

# A block that begins 2**30 tokens after its sequence's first token.
PAST_THE_END = tl.constexpr(2**24)


@triton.jit
def _fill(table_ptr, used_rows, rows, LENGTHS: tl.constexpr):
    """Writes the unused rows of a table; the programs share them."""
    step = tl.num_programs(0) * LENGTHS
    for first in tl.range(used_rows + tl.program_id(0) * LENGTHS, rows, step):
        row = first + tl.arange(0, LENGTHS)
        tl.store(table_ptr + 2 * row, 0, mask=row < rows)
        tl.store(table_ptr + 2 * row + 1, PAST_THE_END, mask=row < rows)


@triton.jit(do_not_specialize=["batch", "rows", "long_rows"])
def _attention_blocks_kernel(
    cu_seqlens_ptr,  # (batch+1,), int32
    all_blocks_ptr,  # (rows, 2), int32
    long_blocks_ptr,  # (long_rows, 2), int32
    batch,
    rows,
    long_rows,
    BLOCK: tl.constexpr,  # tokens of a block
    SHORT: tl.constexpr,  # tokens of the longest sequence that is not in long_blocks
    LENGTHS: tl.constexpr,
):
    sequence = tl.program_id(0)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    preceding = tl.zeros([LENGTHS], tl.int32)
    used_rows = tl.zeros([LENGTHS], tl.int32)
    used_long_rows = tl.zeros([LENGTHS], tl.int32)
    for first in tl.range(0, batch, LENGTHS):
        other = first + tl.arange(0, LENGTHS)
        inside = other < batch
        start = tl.load(cu_seqlens_ptr + other, mask=inside, other=0)
        lengths = tl.load(cu_seqlens_ptr + other + 1, mask=inside, other=0) - start
        counts = tl.cdiv(lengths, BLOCK)
        precedes = (lengths > length) | ((lengths == length) & (other < sequence))
        preceding += tl.where(precedes, counts, 0)
        used_rows += counts
        used_long_rows += tl.where(lengths > SHORT, counts, 0)
    first_row = tl.sum(preceding)
    count = tl.cdiv(length, BLOCK)
    long_count = tl.where(length > SHORT, count, 0)
    for first in tl.range(0, count, LENGTHS):
        block = first + tl.arange(0, LENGTHS)
        row = first_row + block
        mask = (block < count) & (row < rows)
        tl.store(all_blocks_ptr + 2 * row, sequence, mask=mask)
        tl.store(all_blocks_ptr + 2 * row + 1, block, mask=mask)
        mask = (block < long_count) & (row < long_rows)
        tl.store(long_blocks_ptr + 2 * row, sequence, mask=mask)
        tl.store(long_blocks_ptr + 2 * row + 1, block, mask=mask)
    _fill(all_blocks_ptr, tl.sum(used_rows), rows, LENGTHS)
    _fill(long_blocks_ptr, tl.sum(used_long_rows), long_rows, LENGTHS)


def config() -> dict:
    """Launch parameters; not tuned on a device yet."""
    sizes = {"BLOCK": TABLE_BLOCK.value, "SHORT": LONGEST, "LENGTHS": 256}
    return {**sizes, "num_warps": 4}


def attention_blocks(cu_seqlens: Tensor, rows: int, long_rows: int) -> tuple[Tensor, Tensor]:
    """(all_blocks (rows, 2), long_blocks (long_rows, 2)), int32."""
    cu_seqlens, batch = cu_seqlens.contiguous(), cu_seqlens.shape[0] - 1
    new = lambda n: torch.empty((n, 2), dtype=torch.int32, device=cu_seqlens.device)
    tables = new(rows), new(long_rows)
    if batch:
        sizes = (batch, rows, long_rows)
        run(_attention_blocks_kernel, (batch,), cu_seqlens, *tables, *sizes, **config())
    return tables
