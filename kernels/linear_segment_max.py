"""The maxima of x W^T + b over each packed sequence, and their gradient from the rows that have them.

    y[s, v] = max_t x[t] . W[v] + b[v],   t over sequence s
    dW[v] = sum_s dy[s, v] x[argmax[s, v]],   dx[t] = sum of dy[s, v] W[v] over argmax[s, v] = t

Tiling: forward, one program is (sequence, BLOCK_N columns of y). It computes BLOCK_M tokens at a time by matrix
instructions and keeps their maxima in registers; the product is never stored. Programs that run at the same time share
their block of W in the L2 cache. The gradients are sums of weighted rows: one program adds the rows of one row of the
result, ENTRIES at a time, in BLOCK columns. For dx the maxima are sorted by their token, those with a gradient of 0
behind all tokens. There are no atomics.

Bytes: forward x once for every BLOCK_N columns, W once for each sequence, most of both from the L2 cache; y and argmax.
The gradients read one row of x and one of W for each maximum whose gradient is not 0.
Source: Formal et al. 2021, arXiv:2109.10086.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.matrix_product import precision, product_tile
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _linear_segment_max_kernel(
    x_ptr,  # (tokens, inner)
    weight_ptr,  # (width, inner)
    bias_ptr,  # (width,)
    cu_seqlens_ptr,  # (batch+1,), int32
    y_ptr,  # (batch, width)
    argmax_ptr,  # (batch, width), int32
    width,
    inner,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    sequence = tl.program_id(0)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    rows_ptr = x_ptr + first.to(tl.int64) * inner
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    argmax = tl.zeros([BLOCK_N], tl.int32)
    for start in tl.range(0, length, BLOCK_M):
        # Rows beyond the last are the last again, and so change no maximum.
        row = tl.minimum(start + tl.arange(0, BLOCK_M), length - 1)
        logits = product_tile(
            rows_ptr, weight_ptr, row, column, length, width, inner, True, BLOCK_K, EVEN, PRECISION
        )
        logits += bias[None, :]
        nan = logits != logits
        any_nan = tl.max(nan.to(tl.int32), 0) > 0
        highest = tl.max(tl.where(nan, float("-inf"), logits), 0)
        reaches = tl.where(any_nan[None, :], nan, logits == highest[None, :])
        where = tl.min(tl.where(reaches, row[:, None], 2147483647), 0)
        highest = tl.where(any_nan, float("nan"), highest)
        better = (highest > largest) | ((highest != highest) & (largest == largest))
        largest = tl.where(better, highest, largest)
        argmax = tl.where(better, where, argmax)
    target = sequence.to(tl.int64) * width + column
    y = tl.where(length > 0, largest, 0.0)
    tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(argmax_ptr + target, tl.where(length > 0, first + argmax, -1), mask=inside)


@triton.jit
def _weighted_rows_kernel(
    rows_ptr,  # (any, width)
    factors_ptr,  # (entries,)
    ids_ptr,  # (entries,), int64: a row for each factor
    bounds_ptr,  # (rows of out + 1,), int32: the entries of each row of out
    out_ptr,  # (rows of out, width)
    width,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    target = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = tl.load(bounds_ptr + target)
    last = tl.load(bounds_ptr + target + 1)
    sums = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in tl.range(first, last, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        factor = tl.load(factors_ptr + entry, mask=entry < last, other=0.0).to(tl.float32)
        row = tl.load(ids_ptr + entry, mask=entry < last, other=0)
        mask = (factor != 0.0)[:, None] & inside[None, :]
        rows = tl.load(rows_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0)
        sums += rows.to(tl.float32) * factor[:, None]
    out = tl.sum(sums, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + target.to(tl.int64) * width + column, out, mask=inside)


def config(itemsize: int) -> dict:
    """Launch parameters; not tuned on a device yet. Few tokens a block, because most texts are short."""
    wide = itemsize == 4
    tile = {"BLOCK_M": 32 if wide else 64, "BLOCK_N": 64, "BLOCK_K": 32 if wide else 64}
    return {**tile, "num_warps": 4, "num_stages": 3}


def config_rows(width: int) -> dict:
    """Launch parameters of the gradients; not tuned on a device yet."""
    return {"ENTRIES": 16, "BLOCK": min(128, triton.next_power_of_2(width)), "num_warps": 4}


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    yield "weighted rows", _weighted_rows_kernel, config_rows(768)


def linear_segment_max_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """(y (batch, width), argmax int32 (batch, width)) for hidden (tokens, inner), weight (width, inner)."""
    hidden, weight, cu_seqlens = hidden.contiguous(), weight.contiguous(), cu_seqlens.contiguous()
    batch, (width, inner) = cu_seqlens.shape[0] - 1, weight.shape
    y = hidden.new_empty((batch, width))
    argmax = hidden.new_empty((batch, width), dtype=torch.int32)
    if y.numel():
        launch = config(hidden.element_size())
        run(
            _linear_segment_max_kernel,
            (batch, triton.cdiv(width, launch["BLOCK_N"])),
            hidden,
            weight,
            None if bias is None else bias.contiguous(),
            cu_seqlens,
            y,
            argmax,
            width,
            inner,
            HAS_BIAS=bias is not None,
            EVEN=inner % launch["BLOCK_K"] == 0,
            PRECISION=precision(hidden.element_size()),
            **launch,
        )
    return y, argmax


def linear_segment_max_dhidden(
    dvalues: Tensor, argmax: Tensor, weight: Tensor, tokens: int
) -> Tensor:
    """(tokens, inner) for dvalues and argmax (batch, width), weight (width, inner)."""
    factors = dvalues.where(argmax >= 0, 0).flatten()
    # The factors of 0 come after all tokens.
    target = argmax.flatten().where(factors != 0, tokens)
    target, order = target.sort(stable=True)
    edges = torch.arange(tokens + 1, dtype=torch.int32, device=target.device)
    bounds = torch.searchsorted(target, edges, out_int32=True)
    return _weighted_rows(weight, factors[order], order % max(1, weight.shape[0]), bounds, tokens)


def linear_segment_max_dweight(dvalues: Tensor, argmax: Tensor, hidden: Tensor) -> Tensor:
    """(width, inner) for dvalues and argmax (batch, width), hidden (tokens, inner)."""
    batch, width = dvalues.shape
    factors = dvalues.where(argmax >= 0, 0).t().flatten()
    bounds = torch.arange(width + 1, dtype=torch.int32, device=dvalues.device) * batch
    return _weighted_rows(hidden, factors, argmax.t().flatten().long(), bounds, width)


def _weighted_rows(
    rows: Tensor, factors: Tensor, ids: Tensor, bounds: Tensor, count: int
) -> Tensor:
    """out[r] = sum of factors[e] rows[ids[e]] over the entries e from bounds[r] to bounds[r + 1]."""
    rows, width = rows.contiguous(), rows.shape[1]
    out = rows.new_empty((count, width))
    if out.numel():
        launch = config_rows(width)
        grid = (count, triton.cdiv(width, launch["BLOCK"]))
        run(_weighted_rows_kernel, grid, rows, factors, ids, bounds, out, width, **launch)
    return out
