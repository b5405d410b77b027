"""A tile of a matrix product, for kernels with an epilogue of their own; and which tile a program has."""

import triton
import triton.language as tl


def precision(itemsize: int) -> str:
    """What tl.dot takes to round as the dtype does. TF32 keeps 11 bits of a factor; three products keep all 24."""
    return "tf32x3" if itemsize == 4 else "ieee"


@triton.jit
def grouped_tile(rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(row block, column block) of this program, which are numbered in groups of GROUP row blocks."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    return first + place % size, place // size


@triton.jit
def product_tile(
    a_ptr,
    b_ptr,
    row,
    column,
    rows,
    width,
    inner,
    TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a (rows, inner) times b (inner, width), or b^T (width, inner): a tile in float32.

    EVEN: inner is a multiple of BLOCK_K. PRECISION: of products of float32.
    """
    # Rows beyond the last are computed from the last. Clamped columns would not be read as vectors.
    a_row = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    b_column = column.to(tl.int64)[None, :]
    inside = (column < width)[None, :]
    sums = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in tl.range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        b_index = b_column * inner + k[:, None] if TRANSPOSED else k[:, None] * width + b_column
        if EVEN:
            a = tl.load(a_ptr + a_row * inner + k[None, :])
            b = tl.load(b_ptr + b_index, mask=inside, other=0.0)
        else:
            a = tl.load(a_ptr + a_row * inner + k[None, :], mask=k[None, :] < inner, other=0.0)
            b = tl.load(b_ptr + b_index, mask=inside & (k[:, None] < inner), other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    return sums
