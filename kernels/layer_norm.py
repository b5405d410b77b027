"""LayerNorm and RMSNorm of residual + dropout(x + x_bias), forward and backward.

    y = (h - mean(h)) * rstd * weight + bias
    dh = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_sum,  g = dy * weight

`dresidual_sum` is the gradient of h, if h is a result too.

Tiling: one program holds ROWS rows in registers. Each row is CHUNKS chunks of CHUNK columns, a power of two
(768 = 3 x 256), so no lane is idle. A width without such a division takes one masked chunk. Up to 1,024 columns a warp
has whole rows, so sums over a row need no barrier. Weights and biases are loaded with addresses of the rows' shape. A
one-dimensional load would have another layout, whose conversion goes through shared memory.

The backward is persistent: each program takes many rows, keeps its partial column sums (dweight, dbias, dx_bias) in
registers and writes them once. These sums leave room for few warps on a multiprocessor, too few to hide the latency of
memory. So the rows of the next STAGES - 1 turns are copied to shared memory while a turn computes. A second kernel adds
up the programs' sums.

Bytes per element, 2-byte types: forward 4 to 8 (x, y, and if present residual and h), backward 6 to 10.
Source: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread, threshold_and_scale
from fastenc.kernels.launch import tunable
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def row_statistics(
    row_chunks,
    sums,
    eps,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    RMS: tl.constexpr,
):
    """(mean, rstd), both (rows, 1), of rows in registers; sums: of their chunks.

    The mean has the sum's rounding error: equal elements would deviate from it, and a small eps would make that large.
    The mean of the deviations is that error. It corrects the mean, and the variance as E[d^2] - E[d]^2.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
    """
    mean = tl.sum(sums, 1)[:, None] * (1.0 / WIDTH)
    if RMS:
        mean = mean * 0.0
    deviations = tl.zeros_like(sums)
    squares = tl.zeros_like(sums)
    for c in tl.static_range(CHUNKS):
        column = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        deviation = row_chunks[c] - mean
        if CHUNK * CHUNKS != WIDTH:
            deviation = tl.where(column < WIDTH, deviation, 0.0)
        deviations += deviation
        squares += deviation * deviation
    variance = tl.sum(squares, 1)[:, None] * (1.0 / WIDTH)
    if not RMS:
        error = tl.sum(deviations, 1)[:, None] * (1.0 / WIDTH)
        mean += error
        # Of a variance that has overflowed the error may too.
        corrected = tl.maximum(variance - error * error, 0.0)
        variance = tl.where(variance < float("inf"), corrected, variance)
    return mean, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))  # rstd's error would be the whole row's


@triton.jit(do_not_specialize=["rows", "threshold"])
def _layer_norm_fwd_kernel(
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


@triton.jit(do_not_specialize=["rows", "threshold"])
def _layer_norm_bwd_kernel(
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


@triton.jit(do_not_specialize=["programs"])
def _add_programs_kernel(
    partial_ptr,  # (programs, 3, width), float32
    dweight_ptr,  # (width,), float32
    dbias_ptr,  # (width,), float32
    dx_bias_ptr,  # (width,), float32
    programs,
    width,
    FIRST: tl.constexpr,  # of the sums that are wanted
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    which = tl.program_id(1) + FIRST
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, programs, ROWS, num_stages=STAGES):
        program = first + tl.arange(0, ROWS)
        index = (program * 3 + which)[:, None] * width + column[None, :]
        mask = (program < programs)[:, None] & (column < width)[None, :]
        partial += tl.load(partial_ptr + index, mask=mask, other=0.0)
    sums = tl.sum(partial, 0)
    if which == 0:
        tl.store(dweight_ptr + column, sums, mask=column < width)
    elif which == 1:
        tl.store(dbias_ptr + column, sums, mask=column < width)
    else:
        tl.store(dx_bias_ptr + column, sums, mask=column < width)


# Launch of _add_programs_kernel. The sums of 264 programs take three turns, whose loads are all under way at once.
ADD = {"ROWS": 128, "BLOCK": 32, "STAGES": 4, "num_warps": 8}
LANES_BYTES = 512  # bytes that a warp reads at a time, 16 per lane


def chunks(width: int, itemsize: int) -> tuple[int, int]:
    """(columns of a chunk, number of chunks).

    A chunk is a power of two of columns that divides the width into at most 8 chunks. A width without such a divisor
    takes one masked chunk. Up to 1,024 columns, a chunk is at most what a warp reads at a time.
    """
    chunk = width & -width
    if width <= 1024:
        chunk = min(chunk, LANES_BYTES // itemsize)
    if chunk >= 64 and width // chunk <= 8:
        return chunk, width // chunk
    return triton.next_power_of_2(width), 1


@tunable(
    "layer_norm",
    # Of the backward.
    candidates=(
        *(
            {"STAGES": stages, "PROGRAMS": programs}
            for stages, programs in ((2, 2), (3, 2), (4, 2), (3, 3))
        ),
        # Two warps share a row. Each has half as many registers, so twice as many fit on a multiprocessor.
        *(
            {"ROWS": rows, "num_warps": 2 * rows, "STAGES": 3, "PROGRAMS": 8 // rows}
            for rows in (4, 2, 1)
        ),
        {"ROWS": 1, "num_warps": 1, "STAGES": 3, "PROGRAMS": 8},  # no warp waits for another
    ),
    ROWS=(4, 8),
    num_warps=(4, 8),
)
def config(width: int, itemsize: int, backward: bool) -> dict:
    """Launch parameters where no table has better ones.

    Narrow rows: each warp has one or more whole rows. Wide rows: all warps share a row.

    The backward has STAGES, the turns of its loop whose rows are in shared memory at a time (1: none), and PROGRAMS,
    for each multiprocessor: as many as its registers hold. Of the widest rows they hold one; the second one waits.
    """
    chunk, count = chunks(width, itemsize)
    if chunk * itemsize <= LANES_BYTES:
        rows, warps = 4 * LANES_BYTES // (chunk * itemsize), 4
    else:
        # About 1,024 elements for each warp of a program stay in registers. Triton needs a power of two of rows.
        rows = 1 << (min(8, (1024 if backward else 2048) // (chunk * count)) or 1).bit_length() - 1
        warps = max(4, triton.next_power_of_2(width) // (512 if backward else 1024))
    launch = {"CHUNK": chunk, "CHUNKS": count, "ROWS": rows, "num_warps": warps}
    if backward:
        stages = (3 if itemsize == 2 else 2) if chunk * itemsize <= LANES_BYTES else 1
        launch |= {"STAGES": stages, "PROGRAMS": backward_programs(width)}
    return launch


# With these widths a test compiles every launch that the rule gives for transformers' usual widths.
_WIDTHS = (256, 512, 640, 1536, 2048, 2560, 3072, 3584, 5120, 6144, 7168)


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    in_float32 = (128, 384, 768, 1024, 4096, 8192)
    for width, backward in product(sorted({*in_float32, *_WIDTHS}), (False, True)):
        for dtype in ("bfloat16", "float32") if width in in_float32 else ("bfloat16",):
            key = {"width": width, "itemsize": 2 if dtype == "bfloat16" else 4}
            yield {**key, "backward": backward, "dropout": True, "dtype": dtype}
    for backward in (False, True):
        key = {"width": 768, "itemsize": 2, "backward": backward}
        yield {**key, "dropout": False, "dtype": "float16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    flags = {"HAS_WEIGHT": True, "HAS_DROPOUT": key["dropout"], "WIDTH": key["width"]}
    chunk, count = chunks(key["width"], key["itemsize"])
    flags |= {"CHUNK": chunk, "CHUNKS": count}
    if key["backward"]:
        kernel = _layer_norm_bwd_kernel
        flags |= {"WANTS_AFFINE": True, "WANTS_X_BIAS": True, "HAS_DRESIDUAL_SUM": True}
    else:
        kernel = _layer_norm_fwd_kernel
        flags |= {"HAS_RESIDUAL": True, "HAS_X_BIAS": True, "SAVE_H": True, "SAVE_STATISTICS": True}
    biased = {} if key["backward"] else {"HAS_BIAS": True}
    yield "", kernel, {**flags, "RMS": False, **biased}
    if key["width"] == 768:  # RMSNorm leaves out a sum; one width stands for all
        biased = {} if key["backward"] else {"HAS_BIAS": False}
        yield " rms", kernel, {**flags, "RMS": True, **biased}


def backward_programs(width: int) -> int:
    """Number of programs of a backward for each multiprocessor."""
    return 4 if width <= 256 else 2


def layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    eps: float,
    rms: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, h, mean, rstd) as the op fastenc::layer_norm_fwd returns them."""
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    fused = residual is not None or x_bias is not None or rng_state is not None
    y = torch.empty_like(x)
    h = torch.empty_like(x) if save and fused else x.new_empty((0,))
    mean, rstd = (x.new_empty((rows if save else 0,), dtype=torch.float32) for _ in range(2))
    if not rows:
        return y, h, mean, rstd
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = config(width, x.element_size(), False, like=x, dropout=threshold > 0)
    some = lambda tensor: x if tensor is None else tensor.contiguous()
    run(
        _layer_norm_fwd_kernel,
        (triton.cdiv(rows, launch["ROWS"]),),
        x,
        some(residual),
        some(x_bias),
        some(weight),
        some(bias),
        y,
        h,
        mean,
        rstd,
        some(rng_state),
        rows,
        eps,
        threshold,
        drop_scale,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        HAS_X_BIAS=x_bias is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_DROPOUT=threshold > 0,
        SAVE_H=save and fused,
        SAVE_STATISTICS=save,
        RMS=rms,
        **launch,
    )
    return y, h, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    dresidual_sum: Tensor | None,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    rms: bool,
    wants_affine: bool,
    wants_x_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dh, dx, dweight, dbias, dx_bias) as the op fastenc::layer_norm_bwd returns them."""
    dy = dy.contiguous()
    width = h.shape[-1]
    rows = h.numel() // width if width else 0
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = dict(config(max(1, width), h.element_size(), True, like=h, dropout=threshold > 0))
    # The number of programs sets the order of the sums. It depends on the shape and the kind of device alone.
    max_programs = persistent_programs(h.device, launch.pop("PROGRAMS"))
    programs = max(1, min(max_programs, triton.cdiv(rows, launch["ROWS"])))
    dh = torch.empty_like(h)
    dx = torch.empty_like(h) if rng_state is not None else h.new_empty((0,))
    partial = torch.empty((programs, 3, width), dtype=torch.float32, device=h.device)
    if rows:
        run(
            _layer_norm_bwd_kernel,
            (programs,),
            dy,
            h if dresidual_sum is None else dresidual_sum.contiguous(),
            h,
            mean,
            rstd,
            h if weight is None else weight.contiguous(),
            dh,
            dx,
            partial,
            h if rng_state is None else rng_state,
            rows,
            threshold,
            drop_scale,
            WIDTH=width,
            HAS_WEIGHT=weight is not None,
            HAS_DROPOUT=threshold > 0,
            HAS_DRESIDUAL_SUM=dresidual_sum is not None,
            WANTS_AFFINE=wants_affine,
            WANTS_X_BIAS=wants_x_bias,
            RMS=rms,
            **launch,
        )
        if rng_state is not None and not threshold:
            dx.copy_(dh)
    # Separate tensors: an op's results must not share memory.
    new = h.new_empty if rows else h.new_zeros
    sums = lambda wanted: new((width if wanted else 0,), dtype=torch.float32)
    dweight, dbias, dx_bias = sums(wants_affine), sums(wants_affine), sums(wants_x_bias)
    if rows and (wants_affine or wants_x_bias):
        first, last = 0 if wants_affine else 2, 3 if wants_x_bias else 2
        run(
            _add_programs_kernel,
            (triton.cdiv(width, ADD["BLOCK"]), last - first),
            partial,
            dweight,
            dbias,
            dx_bias,
            programs,
            width,
            FIRST=first,
            **ADD,
        )
    return dh, dx, dweight, dbias, dx_bias
