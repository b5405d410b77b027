"""Merges attention over two disjoint sets of keys: those in a query's window and the global ones.

    out = w out_1 + (1 - w) out_2,  w = exp(lse_1) / (exp(lse_1) + exp(lse_2))

Tiling: one program takes ROWS rows (token, head), each of head_dim elements. Bytes per element, 2-byte types: forward
6, backward 10.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _window_share(window_lse, others_lse):
    """w; 0 for a query without any key."""
    share = 1.0 / (1.0 + tl.exp(others_lse - window_lse))
    return tl.where(window_lse == float("-inf"), 0.0, share)


@triton.jit(do_not_specialize=["tokens"])
def _merge_forward_kernel(
    window_ptr,  # (tokens, HEADS, D)
    window_lse_ptr,  # (HEADS, tokens), float32
    others_ptr,  # as window
    others_lse_ptr,  # as window_lse
    out_ptr,  # as window
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < tokens.to(tl.int64) * HEADS
    of_lse = row % HEADS * tokens + row // HEADS
    share = _window_share(
        tl.load(window_lse_ptr + of_lse, mask=is_row, other=0.0),
        tl.load(others_lse_ptr + of_lse, mask=is_row, other=0.0),
    )[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    index, mask = row[:, None] * D + d, is_row[:, None] & (d < D)
    window = tl.load(window_ptr + index, mask=mask, other=0.0).to(tl.float32)
    others = tl.load(others_ptr + index, mask=mask, other=0.0).to(tl.float32)
    merged = others + (window - others) * share
    tl.store(out_ptr + index, merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _merge_backward_kernel(
    dout_ptr,  # (tokens, HEADS, D)
    window_ptr,  # the results and their log-sum-exps as in the forward
    window_lse_ptr,
    others_ptr,
    others_lse_ptr,
    key_bias_ptr,  # (tokens,), float32, negative at global tokens, whose gradients are 0
    dwindow_ptr,  # the gradients, each as its tensor
    dwindow_lse_ptr,
    dothers_ptr,
    dothers_lse_ptr,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < tokens.to(tl.int64) * HEADS
    of_lse = row % HEADS * tokens + row // HEADS
    share = _window_share(
        tl.load(window_lse_ptr + of_lse, mask=is_row, other=0.0),
        tl.load(others_lse_ptr + of_lse, mask=is_row, other=0.0),
    )
    is_local = tl.load(key_bias_ptr + row // HEADS, mask=is_row, other=0.0) >= 0
    d = tl.arange(0, BLOCK_D)[None, :]
    index, mask = row[:, None] * D + d, is_row[:, None] & (d < D)
    dout = tl.load(dout_ptr + index, mask=mask & is_local[:, None], other=0.0).to(tl.float32)
    window = tl.load(window_ptr + index, mask=mask, other=0.0).to(tl.float32)
    others = tl.load(others_ptr + index, mask=mask, other=0.0).to(tl.float32)
    dwindow, dothers = dout * share[:, None], dout * (1.0 - share)[:, None]
    tl.store(dwindow_ptr + index, dwindow.to(dwindow_ptr.dtype.element_ty), mask=mask)
    tl.store(dothers_ptr + index, dothers.to(dothers_ptr.dtype.element_ty), mask=mask)
    dlse = share * (1.0 - share) * tl.sum(dout * (window - others), 1)
    tl.store(dwindow_lse_ptr + of_lse, dlse, mask=is_row)
    tl.store(dothers_lse_ptr + of_lse, -dlse, mask=is_row)


def config(head_dim: int) -> dict:
    """Launch parameters; not tuned on a device yet. A program has about 2,048 elements."""
    block = triton.next_power_of_2(head_dim)
    return {"ROWS": max(1, 2048 // block), "BLOCK_D": block, "num_warps": 4}


def _launch(kernel: Any, window: Tensor, *pointers: Tensor) -> None:
    tokens, heads, head_dim = window.shape
    launch = config(head_dim)
    if window.numel():
        grid = (triton.cdiv(tokens * heads, launch["ROWS"]),)
        run(kernel, grid, *pointers, tokens, HEADS=heads, D=head_dim, **launch)


def merge_forward(window: Tensor, window_lse: Tensor, others: Tensor, others_lse: Tensor) -> Tensor:
    given = [x.contiguous() for x in (window, window_lse, others, others_lse)]
    out = torch.empty_like(given[0])
    _launch(_merge_forward_kernel, window, *given, out)
    return out


def merge_backward(
    dout: Tensor,
    window: Tensor,
    window_lse: Tensor,
    others: Tensor,
    others_lse: Tensor,
    key_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dwindow, dwindow_lse, dothers, dothers_lse)."""
    given = [x.contiguous() for x in (dout, window, window_lse, others, others_lse, key_bias)]
    dwindow, dwindow_lse, dothers, dothers_lse = map(torch.empty_like, given[1:5])
    _launch(_merge_backward_kernel, window, *given, dwindow, dwindow_lse, dothers, dothers_lse)
    return dwindow, dwindow_lse, dothers, dothers_lse


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    for head_dim in (32, 64, 96, 128):
        constants = {"HEADS": 12, "D": head_dim} | config(head_dim)
        yield f"merged attention {head_dim}", _merge_forward_kernel, constants
        yield (
            f"merged attention backward {head_dim}",
            _merge_backward_kernel,
            constants,
        )
