"""Which short sequences a program takes: on the device, and the grid on the host.

The batch's tokens are cut into segments of BLOCK tokens. A segment takes the sequences that begin in it. They make at
most two tiles. The first has the sequences that end within BLOCK tokens of the segment's first sequence's begin. The
second has the one sequence after these, which begins in the segment and ends past it. A program finds its tile from the
bounds of the sequences at three tokens. In a greedy assignment over the whole batch, each tile would depend on all
tiles before it. A sequence of more than BLOCK tokens, which can only be the last of a segment, is left to other
kernels. Programs of empty tiles exit at once.

The grid, 2 ceil(T / BLOCK) tiles, depends on the number of tokens only. It has half as many where the host knows that
all sequences have a length that divides BLOCK, because then no second tile has tokens.
"""

import triton
import triton.language as tl

LONGEST = 128  # tokens of the largest tile, and of the longest sequence in it


@triton.jit
def tile_bounds(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK: tl.constexpr):
    """(first token, one past the last) of this program's tile."""
    first = tl.program_id(0) // tiles * BLOCK
    last = tl.minimum(first + BLOCK, total_tokens)
    if tiles > 1:  # else the tile is a whole segment, and nothing is read
        end = last - 1
        starts_here = tl.load(starts_ptr + first) == first
        first = tl.where(starts_here, first, tl.load(ends_ptr + first))
        last_start, last = tl.load(starts_ptr + end), tl.load(ends_ptr + end)
        last = tl.where(last - last_start > BLOCK, last_start, last)  # left to other kernels
        full = first + BLOCK
        inside = tl.load(starts_ptr + full, mask=full < total_tokens, other=2147483647)
        middle = tl.minimum(inside, last)
        if tl.program_id(0) % tiles == 1:
            first = middle
        else:
            last = middle
    return first, last


def tiles_of(arguments: dict, max_seqlen: int, launch: dict) -> tuple[int, int]:
    """(segments, tiles of a segment).

    If the batch has max_seqlen tokens for each sequence, every sequence is that long. If this length also divides
    BLOCK, each segment is one whole tile.
    """
    total_tokens, batch = arguments["total_q"], arguments["cu_seqlens_q_ptr"].shape[0] - 1
    whole = total_tokens == batch * max_seqlen and launch["BLOCK"] % max(1, max_seqlen) == 0
    return triton.cdiv(total_tokens, launch["BLOCK"]), 1 if whole else 2
