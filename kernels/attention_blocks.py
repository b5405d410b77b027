"""The blocks that attention's programs take, those of the longest sequence first, made on the device.

Tiling: one program is a sequence. It walks the lengths of all, LENGTHS at a time, to count the blocks of those that go
before, and writes its own behind them. How many blocks there are is known to the device alone; so tables have room for
the most that there can be, and entries that are left lie past every sequence's end, where attention's programs exit at
once. B^2 reads out of the cache.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.attention import TABLE_BLOCK
from fastenc.kernels.attention_short import LONGEST
from fastenc.kernels.run import run
from torch import Tensor

NOWHERE = tl.constexpr(2**24)  # a block that begins 2**30 tokens behind its sequence's first


@triton.jit
def _fill(table_ptr, taken, room, LENGTHS: tl.constexpr):
    """Writes entries of no block behind those that are taken; the programs share them."""
    step = tl.num_programs(0) * LENGTHS
    for first in tl.range(taken + tl.program_id(0) * LENGTHS, room, step):
        place = first + tl.arange(0, LENGTHS)
        tl.store(table_ptr + 2 * place, 0, mask=place < room)
        tl.store(table_ptr + 2 * place + 1, NOWHERE, mask=place < room)


@triton.jit(do_not_specialize=["batch", "every", "long"])
def _attention_blocks_kernel(
    cu_seqlens_ptr,  # (batch+1,), int32
    every_ptr,  # (every, 2), int32
    long_ptr,  # (long, 2), int32
    batch,
    every,
    long,
    BLOCK: tl.constexpr,  # tokens
    SHORT: tl.constexpr,  # tokens of the longest sequence that is not in the second table
    LENGTHS: tl.constexpr,
):
    sequence = tl.program_id(0)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    before = tl.zeros([LENGTHS], tl.int32)
    total = tl.zeros([LENGTHS], tl.int32)
    total_long = tl.zeros([LENGTHS], tl.int32)
    for first in tl.range(0, batch, LENGTHS):
        other = first + tl.arange(0, LENGTHS)
        inside = other < batch
        start = tl.load(cu_seqlens_ptr + other, mask=inside, other=0)
        lengths = tl.load(cu_seqlens_ptr + other + 1, mask=inside, other=0) - start
        counts = tl.cdiv(lengths, BLOCK)
        goes_before = (lengths > length) | ((lengths == length) & (other < sequence))
        before += tl.where(goes_before, counts, 0)
        total += counts
        total_long += tl.where(lengths > SHORT, counts, 0)
    begin = tl.sum(before)
    count = tl.cdiv(length, BLOCK)
    count_long = tl.where(length > SHORT, count, 0)
    for first in tl.range(0, count, LENGTHS):
        number = first + tl.arange(0, LENGTHS)
        place = begin + number
        mask = (number < count) & (place < every)
        tl.store(every_ptr + 2 * place, sequence, mask=mask)
        tl.store(every_ptr + 2 * place + 1, number, mask=mask)
        mask = (number < count_long) & (place < long)
        tl.store(long_ptr + 2 * place, sequence, mask=mask)
        tl.store(long_ptr + 2 * place + 1, number, mask=mask)
    _fill(every_ptr, tl.sum(total), every, LENGTHS)
    _fill(long_ptr, tl.sum(total_long), long, LENGTHS)


def config() -> dict:
    """Launch parameters; not tuned on a device yet."""
    sizes = {"BLOCK": TABLE_BLOCK.value, "SHORT": LONGEST, "LENGTHS": 256}
    return {**sizes, "num_warps": 4}


def attention_blocks(cu_seqlens: Tensor, every: int, long: int) -> tuple[Tensor, Tensor]:
    """(every, 2) and (long, 2), int32: sequence and number of the block; the second of sequences that are not short."""
    cu_seqlens, batch = cu_seqlens.contiguous(), cu_seqlens.shape[0] - 1
    tables = [
        torch.empty((n, 2), dtype=torch.int32, device=cu_seqlens.device) for n in (every, long)
    ]
    if batch:
        run(_attention_blocks_kernel, (batch,), cu_seqlens, *tables, batch, every, long, **config())
    return tables[0], tables[1]
