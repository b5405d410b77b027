"""The kernel of the norms' backward.

Tiling: a persistent grid. Each program takes many rows, ROWS at a time, keeps its partial column sums (dweight, dbias,
dx_bias) in registers and writes them once. These sums leave room for few warps on a multiprocessor, too few to hide the
latency of memory. So the rows of the next STAGES - 1 turns are copied to shared memory while a turn computes.
"""

import triton
import triton.language as tl
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread


@triton.jit(do_not_specialize=["rows", "threshold"])
def layer_norm_bwd_kernel(
    dy_ptr,  # (rows, width)
    dresidual_sum_ptr,  # (rows, width)
    h_ptr,  # (rows, width)
    mean_ptr,  # (rows,)
    rstd_ptr,  # (rows,)
    weight_ptr,  # (width,)
    dh_ptr,  # (rows, width)
    dx_ptr,  # (rows, width), only with dropout
    partial_ptr,  # (programs, 3, width), float32: dweight, dbias, dx_bias
    rng_ptr,
    rows,
    threshold,
    drop_scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_DRESIDUAL_SUM: tl.constexpr,
    WANTS_AFFINE: tl.constexpr,
    WANTS_X_BIAS: tl.constexpr,
    RMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    WHOLE: tl.constexpr = CHUNK * CHUNKS == WIDTH
    if HAS_DROPOUT:
        rng = load_rng(rng_ptr)
    weights = ()
    if HAS_WEIGHT:
        for c in tl.static_range(CHUNKS):
            place = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
            weight = tl.load(weight_ptr + place, mask=place < WIDTH, other=0.0)
            weights = weights + (weight,)  # noqa: RUF005
    dweights = ()
    dbiases = ()
    dx_biases = ()
    for _ in tl.static_range(CHUNKS):
        dweights = dweights + (tl.zeros([ROWS, CHUNK], tl.float32),)  # noqa: RUF005
        dbiases = dbiases + (tl.zeros([ROWS, CHUNK], tl.float32),)  # noqa: RUF005
        dx_biases = dx_biases + (tl.zeros([ROWS, CHUNK], tl.float32),)  # noqa: RUF005
    each = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, each, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS))[:, None]
        start = row.to(tl.int64) * WIDTH
        inside = row < rows
        if HAS_DROPOUT:
            keys = row_keys(rng, 0, row)
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
        sum_g = tl.zeros([ROWS, CHUNK], tl.float32)
        sum_gx = tl.zeros([ROWS, CHUNK], tl.float32)
        xhats = ()
        gs = ()
        new_dweights = ()
        new_dbiases = ()
        for c in tl.static_range(CHUNKS):
            column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
            mask = inside if WHOLE else inside & (column < WIDTH)
            h = tl.load(h_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            # 0 where there is no element, and so is what it adds to any sum.
            dy = tl.load(dy_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            xhat = (h - mean) * rstd
            g = dy
            if HAS_WEIGHT:
                g = dy * weights[c].to(tl.float32)
            sum_g += g
            sum_gx += g * xhat
            xhats = xhats + (xhat,)  # noqa: RUF005
            gs = gs + (g,)  # noqa: RUF005
            new_dweights = new_dweights + (dweights[c] + dy * xhat,)  # noqa: RUF005
            new_dbiases = new_dbiases + (dbiases[c] + dy,)  # noqa: RUF005
        dweights = new_dweights
        dbiases = new_dbiases
        mean_g = tl.sum(sum_g, 1)[:, None] * (1.0 / WIDTH)
        mean_gx = tl.sum(sum_gx, 1)[:, None] * (1.0 / WIDTH)
        if RMS:
            mean_g = mean_g * 0.0
        new_dx_biases = ()
        for c in tl.static_range(CHUNKS):
            column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
            mask = inside if WHOLE else inside & (column < WIDTH)
            dx = (gs[c] - mean_g - xhats[c] * mean_gx) * rstd
            if HAS_DRESIDUAL_SUM:
                sums = tl.load(dresidual_sum_ptr + start + column, mask=mask, other=0.0)
                dx += sums.to(tl.float32)
            tl.store(dh_ptr + start + column, dx.to(dh_ptr.dtype.element_ty), mask=mask)
            if HAS_DROPOUT:
                dx = tl.where(is_kept(keys, spread(column), threshold), dx * drop_scale, 0.0)
                tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            # Past the width dx is not 0, but nobody reads that sum; past the rows it is 0, because rstd is.
            new_dx_biases = new_dx_biases + (dx_biases[c] + dx,)  # noqa: RUF005
        dx_biases = new_dx_biases
    for c in tl.static_range(CHUNKS):
        column = tl.arange(0, CHUNK) + c * CHUNK
        pointers = partial_ptr + tl.program_id(0).to(tl.int64) * (3 * WIDTH) + column
        if WANTS_AFFINE:
            tl.store(pointers, tl.sum(dweights[c], 0), mask=column < WIDTH)
            tl.store(pointers + WIDTH, tl.sum(dbiases[c], 0), mask=column < WIDTH)
        if WANTS_X_BIAS:
            tl.store(pointers + 2 * WIDTH, tl.sum(dx_biases[c], 0), mask=column < WIDTH)
