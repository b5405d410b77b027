"""Attention over a window and global tokens (Longformer): two calls of the attention kernels, merged.

    out = w out_1 + (1 - w) out_2,  w = exp(lse_1) / (exp(lse_1) + exp(lse_2))

out_1 is the attention to the keys in a query's window, out_2 that to the global keys. Tiling of the kernels here: one
program takes ROWS rows (token, head), each of head_dim elements. Bytes per element, 2-byte types: 6.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.attention import attention_backward, attention_forward
from fastenc.kernels.attention_call import AttentionCall, later_state, self_attention_call
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _window_share(window_lse, others_lse):
    """w; 0 for a query without any key."""
    share = 1.0 / (1.0 + tl.exp(others_lse - window_lse))
    return tl.where(window_lse == float("-inf"), 0.0, share)


@triton.jit(do_not_specialize=["tokens"])
def _merge_kernel(
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
def _share_kernel(
    dout_ptr,  # (tokens, HEADS, D)
    window_lse_ptr,  # (HEADS, tokens), float32
    others_lse_ptr,
    key_bias_ptr,  # (tokens,), float32, negative at global tokens, whose gradients are 0
    dwindow_ptr,  # as dout
    dothers_ptr,
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
    is_local = tl.load(key_bias_ptr + row // HEADS, mask=is_row, other=0.0) >= 0
    d = tl.arange(0, BLOCK_D)[None, :]
    index, mask = row[:, None] * D + d, is_row[:, None] & (d < D)
    dout = tl.load(dout_ptr + index, mask=mask & is_local[:, None], other=0.0).to(tl.float32)
    tl.store(dwindow_ptr + index, (dout * share).to(dwindow_ptr.dtype.element_ty), mask=mask)
    dothers = dout * (1.0 - share)
    tl.store(dothers_ptr + index, dothers.to(dothers_ptr.dtype.element_ty), mask=mask)


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


def global_window_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, global_tokens: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """(out (tokens, H, D), lse (2, H, tokens) float32). rest: the arguments of the op's schema after global_tokens."""
    to_window, to_globals = _attention_calls(q.shape[0], global_tokens, *rest)
    window, window_lse = attention_forward(q, k, v, *to_window)
    others, others_lse = attention_forward(q, k[global_tokens], v[global_tokens], *to_globals)
    out = torch.empty_like(window)
    _launch(_merge_kernel, out, window, window_lse, others, others_lse, out)
    return out, torch.stack([window_lse, others_lse])


def global_window_attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    global_tokens: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """(dqkv, dbias). rest: the arguments of the op's schema after global_tokens.

    With w dout as the gradient of the window's result, and (1 - w) dout as that of the others, the sums of p dp over
    all keys are those of ``out``.
    """
    *others, wants_bias = rest
    to_window, to_globals = _attention_calls(q.shape[0], global_tokens, *others)
    assert to_window.key_bias is not None
    window_lse, others_lse = lse.unbind(0)
    dout = dout.contiguous()
    dwindow, dothers = torch.empty_like(dout), torch.empty_like(dout)
    _launch(_share_kernel, dout, dout, window_lse, others_lse, to_window.key_bias, dwindow, dothers)
    dqkv, *_ = attention_backward(
        dwindow, None, out, window_lse, q, k, v, *to_window, True, False, False
    )
    dqkv = dqkv.view(-1, 3, *q.shape[1:])
    keys, values = k[global_tokens], v[global_tokens]
    dq, dk, dv, *_ = attention_backward(
        dothers, None, out, others_lse, q, keys, values, *to_globals, False, False, False
    )
    dqkv[:, 0] += dq
    # No window has global keys, so their gradients are 0 there.
    dqkv[:, 1].index_copy_(0, global_tokens, dk)
    dqkv[:, 2].index_copy_(0, global_tokens, dv)
    dbias = column_sum(dqkv.flatten(1)) if wants_bias else q.new_empty(0, dtype=torch.float32)
    return dqkv, dbias


def _attention_calls(
    tokens: int,
    global_tokens: Tensor,
    cu_globals: Tensor,
    cu_seqlens: Tensor,
    rng_state: Tensor | None,
    max_seqlen: int,
    dropout_p: float,
    scale: float,
    window_left: int,
    window_right: int,
) -> tuple[AttentionCall, AttentionCall]:
    """The calls over the keys in the window and over the global keys."""
    # A global token is seen as such, and not in the window too.
    key_bias = torch.zeros(tokens, device=cu_seqlens.device)
    key_bias.index_fill_(0, global_tokens, float("-inf"))
    of_sequences = partial(
        self_attention_call, cu_seqlens, max_seqlen, scale=scale, dropout_p=dropout_p
    )
    to_window = of_sequences(
        rng_state=rng_state,
        key_bias=key_bias,
        window_left=window_left,
        window_right=window_right,
    )
    to_globals = of_sequences(
        rng_state=None if rng_state is None else later_state(rng_state, 1),
        cu_seqlens_k=cu_globals,
        max_seqlen_k=min(max_seqlen, global_tokens.shape[0]),
    )
    return to_window, to_globals


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    for head_dim in (32, 64, 96, 128):
        constants = {"HEADS": 12, "D": head_dim} | config(head_dim)
        yield f"merged attention {head_dim}", _merge_kernel, constants
        yield f"shares of merged attention {head_dim}", _share_kernel, constants
