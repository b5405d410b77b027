"""The kernel of the norms' forward.

Tiling: one program holds ROWS rows in registers. Weights and biases are loaded with addresses of the rows' shape. A
one-dimensional load would have another layout, whose conversion goes through shared memory.
"""

import triton
import triton.language as tl
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread
from fastenc.kernels.layer_norm_statistics import row_statistics


@triton.jit(do_not_specialize=["rows", "threshold"])
def layer_norm_fwd_kernel(
    x_ptr,  # (rows, width)
    residual_ptr,  # (rows, width)
    x_bias_ptr,  # (width,)
    weight_ptr,  # (width,)
    bias_ptr,  # (width,)
    y_ptr,  # (rows, width)
    h_ptr,  # (rows, width)
    mean_ptr,  # (rows,), float32
    rstd_ptr,  # (rows,), float32
    rng_ptr,  # (2,), int64: seed and offset
    rows,
    eps,
    threshold,
    drop_scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    SAVE_H: tl.constexpr,
    SAVE_STATISTICS: tl.constexpr,
    RMS: tl.constexpr,
):
    WHOLE: tl.constexpr = CHUNK * CHUNKS == WIDTH
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    start = row.to(tl.int64) * WIDTH
    inside = row < rows
    if HAS_DROPOUT:
        keys = row_keys(load_rng(rng_ptr), 0, row)
    row_chunks = ()
    sums = tl.zeros([ROWS, CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        mask = inside if WHOLE else inside & (column < WIDTH)
        h = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_X_BIAS:
            h += tl.load(x_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_DROPOUT:
            h = tl.where(is_kept(keys, spread(column), threshold), h * drop_scale, 0.0)
        if HAS_RESIDUAL:
            h += tl.load(residual_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        if SAVE_H:
            # Statistics are those of what the backward will read.
            rounded = h.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + start + column, rounded, mask=mask)
            h = rounded.to(tl.float32)
        sums += h  # 0 past the width
        row_chunks = row_chunks + (h,)  # noqa: RUF005  (Triton has no unpacking here)
    mean, rstd = row_statistics(row_chunks, sums, eps, WIDTH, CHUNK, CHUNKS, RMS)
    for c in tl.static_range(CHUNKS):
        column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        mask = inside if WHOLE else inside & (column < WIDTH)
        y = (row_chunks[c] - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), mask=mask)
    if SAVE_STATISTICS:
        tl.store(mean_ptr + row, mean, mask=inside)
        tl.store(rstd_ptr + row, rstd, mask=inside)
