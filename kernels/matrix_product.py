"""A tile of a matrix product, for kernels with an epilogue of their own."""

import triton
import triton.language as tl


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
