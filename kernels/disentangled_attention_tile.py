"""One tile of the scores of disentangled attention: what its kernels share.

A tile of BLOCK queries by BLOCK keys has 2 BLOCK - 1 distances. Its queries' products with the rows of these distances
have the term of pair (m, n) in row m, at n - m + BLOCK; those of its keys likewise. A gather in shared memory brings
each term to its pair.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import load_rows, sequence_bounds

# Numbers that change from batch to batch.
VARYING = ["total_q", "blocks", "origin", "threshold"]


@triton.jit
def program(cu_seqlens_ptr, blocks, BLOCK: tl.constexpr):
    """(first token of the block in its sequence, first token and length of the sequence)."""
    start = tl.program_id(0) % blocks * BLOCK
    first, length = sequence_bounds(cu_seqlens_ptr, tl.program_id(0) // blocks)
    return start, first, length


@triton.jit
def distance_rows(
    position_ptr, first, head,
    SIGN: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """(COUNT, BLOCK_D): the rows of an expanded table from ``first`` on, upwards or, with SIGN -1, downwards."""
    row = first + SIGN * tl.arange(0, COUNT)
    return load_rows(position_ptr + head * D, row, H * D, row >= 0, D, BLOCK_D)


@triton.jit
def _by_pair(terms, BLOCK: tl.constexpr, OF_QUERIES: tl.constexpr):
    """Terms by distance → (BLOCK, BLOCK), queries m by keys n: that of n - m + BLOCK.

    terms: OF_QUERIES (BLOCK, 2 BLOCK), queries by distance; else (2 BLOCK, BLOCK), distances by key.
    A gather along the only axis goes through shared memory. The terms are put there in an order in which no two lanes
    of a warp meet in a bank. When a warp writes, its 32 lanes have 8 rows by 4 pairs of columns. They read such pairs.
    """
    WIDTH: tl.constexpr = 2 * BLOCK
    if OF_QUERIES:
        flat = tl.reshape(terms, [BLOCK // 8, 8, WIDTH // 8, 4, 2])
    else:
        flat = tl.reshape(terms, [WIDTH // 8, 8, BLOCK // 8, 4, 2])
    flat = tl.reshape(tl.permute(flat, [0, 2, 4, 1, 3]), [BLOCK * WIDTH])
    pair = tl.arange(0, BLOCK * BLOCK)
    m, n = pair // BLOCK, pair % BLOCK
    # n - m + BLOCK is 8 eights + near % 8. Written this way, most indices of a thread differ by constants.
    near = n % 8 - m % 8 + 8
    eights = n // 8 - m // 8 + BLOCK // 8 - 1 + near // 8
    if OF_QUERIES:
        group = (m // 8 * (WIDTH // 8) + eights) * 2 + near % 2
        index = group * 32 + m % 8 * 4 + near // 2 % 4
    else:
        group = (eights * (BLOCK // 8) + n // 8) * 2 + n % 2
        index = group * 32 + near % 8 * 4 + n // 2 % 4
    return tl.reshape(tl.gather(flat, index, 0), [BLOCK, BLOCK])


@triton.jit
def products(
    q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores over scale, queries by keys."""
    nearest = start_n - start_m - BLOCK + origin
    s = None
    if position_keys_ptr is not None:
        rows = distance_rows(position_keys_ptr, nearest, head, 1, H, D, BLOCK_D, 2 * BLOCK)
        s = _by_pair(tl.dot(q, rows.T, input_precision=PRECISION), BLOCK, True)
    if position_queries_ptr is not None:
        rows = distance_rows(position_queries_ptr, nearest, head, 1, H, D, BLOCK_D, 2 * BLOCK)
        of_keys = _by_pair(tl.dot(rows, k.T, input_precision=PRECISION), BLOCK, False)
        s = of_keys if s is None else s + of_keys
    return tl.dot(q, k.T, s, input_precision=PRECISION)
