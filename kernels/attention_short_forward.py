"""The kernel of short sequences' forward. Tiling: one program is (tile, head) and takes ROWS queries at a time."""

import triton
import triton.language as tl
from fastenc.kernels.attention_short_grid import tile_bounds
from fastenc.kernels.attention_tile import (
    LOG2_E,
    load_rows,
    natural_lse,
    scaled,
    store_rows,
    unit_of,
)
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread


@triton.jit
def _softmax(q, k, positions, lengths, qk_scale, PRECISION: tl.constexpr):
    """(exp2 of the scores above their maxima, maxima, sums); a row that is no token, with length 0, gets zeros.

    positions: the keys' positions in each row's sequence.
    """
    s = tl.dot(q, k.T, input_precision=PRECISION)
    # Unsigned, so that a key before the sequence is past its end too.
    s = tl.where(positions.to(tl.uint32) < lengths.to(tl.uint32)[:, None], s, float("-inf"))
    exists = lengths > 0
    row_max = tl.where(exists, scaled(tl.max(s, 1), qk_scale), 0.0)
    p = tl.math.exp2(s * unit_of(row_max, qk_scale)[:, None] - row_max[:, None])
    return p, row_max, tl.where(exists, tl.sum(p, 1), 1.0)


@triton.jit(do_not_specialize=["total_tokens", "tiles", "threshold"])
def attention_short_fwd_kernel(
    q_ptr,  # (total_tokens, H, D)
    k_ptr,  # (total_tokens, H // GROUP, D)
    v_ptr,
    out_ptr,  # (total_tokens, H, D), contiguous
    lse_ptr,  # (H, total_tokens), float32
    bounds_ptr,  # (2, total_tokens), int32: by sequence_bounds.py
    rng_ptr,  # (2,), int64: seed and offset, or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    total_tokens,
    tiles,  # of a segment
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    starts_ptr, ends_ptr = bounds_ptr, bounds_ptr + total_tokens
    first, last = tile_bounds(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK)
    if first >= last:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)  # strides of heads may be long
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
    keys = first + tl.arange(0, BLOCK)
    valid = keys < last
    key_head = wide_head // GROUP
    k = load_rows(k_ptr + key_head * stride_k_head, keys, stride_k_token, valid, D, BLOCK_D)
    v = load_rows(v_ptr + key_head * stride_v_head, keys, stride_v_token, valid, D, BLOCK_D)
    # A tile of ROWS tokens takes one turn. With constant bounds the compiler knows this and makes no loop, which would
    # hold its results in registers from the start.
    ONCE: tl.constexpr = BLOCK == ROWS
    for start_m in tl.range(0 if ONCE else first, ROWS if ONCE else last, ROWS):
        tokens = (first if ONCE else start_m) + tl.arange(0, ROWS)
        mask_m = tokens < last
        row_starts = tl.load(starts_ptr + tokens, mask=mask_m, other=0)
        lengths = tl.load(ends_ptr + tokens, mask=mask_m, other=0) - row_starts
        q = load_rows(q_ptr + wide_head * stride_q_head, tokens, stride_q_token, mask_m, D, BLOCK_D)
        positions = keys[None, :] - row_starts[:, None]
        p, row_max, row_sum = _softmax(q, k, positions, lengths, scale * LOG2_E, PRECISION)
        factor = 1.0 / row_sum
        if rng_ptr is not None:
            # Not of the positions, which would stay in registers during the softmax.
            columns = spread(keys)[None, :] - spread(row_starts)[:, None]
            mask_keys = row_keys(rng, head, tokens[:, None])
            p = tl.where(is_kept(mask_keys, columns, threshold), p, 0.0)
            factor *= drop_scale
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * factor[:, None]
        store_rows(out_ptr + head * D, tokens, H * D, mask_m, out, D, BLOCK_D)
        lse = natural_lse(row_max, row_sum, scale)
        tl.store(lse_ptr + head.to(tl.int64) * total_tokens + tokens, lse, mask=mask_m)
