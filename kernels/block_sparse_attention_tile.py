"""Tiles of the blocks that a plan names: what the kernels of block-sparse attention share.

A block of SIZE tokens is cut into tiles of BLOCK tokens.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import LOG2_E, sequence_bounds

# Numbers that change from batch to batch.
VARYING = ["total_q", "tiles", "plan_rows"]


@triton.jit
def program(cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """What a program takes.

    plan_rows: rows between the plans of two heads, 0 if all heads have one plan.
    Returns: (first token of the tile in its sequence, its block, first token and length of the sequence, head, first
    entry of the block's row, one past its last entry).
    """
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tile, sequence, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1)
    first, length = sequence_bounds(cu_seqlens_ptr, sequence)
    block = tile // per_block
    start = block * SIZE + tile % per_block * BLOCK
    row = head * plan_rows + first // SIZE + sequence + block
    exists = start < length
    begin = tl.load(starts_ptr + row, mask=exists, other=0)
    end = tl.load(starts_ptr + row + 1, mask=exists, other=0)
    return start, block, first, length, head, begin, end


@triton.jit
def tile_tokens(start, block, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens of a tile, which of them exist and are the block's)."""
    tokens = start + tl.arange(0, BLOCK)
    return tokens, (tokens < length) & (tokens < (block + 1) * SIZE)


@triton.jit
def plan_entry(blocks_ptr, counts_ptr, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(first token, block, logarithm of the count) of one tile of an entry's block; index: entry * tiles + tile."""
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block = tl.load(blocks_ptr + index // per_block)
    count = tl.load(counts_ptr + index // per_block).to(tl.float32)
    return block * SIZE + index % per_block * BLOCK, block, tl.math.log2(count) / LOG2_E


@triton.jit
def tile_scores(q, k, valid, scale, log_count, PRECISION: tl.constexpr):
    """Queries by keys, -inf for keys that are not there."""
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale + log_count
    return tl.where(valid[None, :], s, float("-inf"))
