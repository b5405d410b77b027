"""The kernel of short sequences' backward.

Tiling: one program is (tile, head of keys) and takes ROWS queries at a time. It computes the probabilities again from
the queries' records (attention_short_record.py), and delta = sum_j p_j dp_j in the tile, so it does not read out.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_short_grid import tile_bounds
from fastenc.kernels.attention_tile import (
    LOG2_E,
    load_record,
    load_rows,
    probabilities,
    store_rows,
    store_sums,
)
from fastenc.kernels.dropout import is_kept, spread


@triton.jit(do_not_specialize=["total_tokens", "tiles", "threshold"])
def attention_short_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,  # (total_tokens, H, D), contiguous
    dq_ptr,  # (total_tokens, H, D), heads next to each other
    dk_ptr,  # (total_tokens, H // GROUP, D), as dq
    dv_ptr,
    record_ptr,  # (H, total_tokens, RECORD), int32: by attention_short_record.py
    sums_ptr,  # (tiles, 3, H, D), float32, zeroed: sums of dq and dv over a tile; dk's are 0. Or None, as if GROUP > 1
    bounds_ptr,
    rng_ptr,  # None without dropout; not read
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_dq,  # of tokens
    stride_dkv,
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
    """Scores are keys by queries: what the products of dk and dv take on their left stays in registers.

    One program has all heads of q that read a head of keys, one after the other.
    """
    starts_ptr, ends_ptr = bounds_ptr, bounds_ptr + total_tokens
    first, last = tile_bounds(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK)
    if first >= last:
        return
    key_head = tl.program_id(1)
    wide_key_head = key_head.to(tl.int64)  # strides of heads may be long
    keys = first + tl.arange(0, BLOCK)
    valid = keys < last
    starts = tl.load(starts_ptr + keys, mask=valid, other=-2)
    k = load_rows(k_ptr + wide_key_head * stride_k_head, keys, stride_k_token, valid, D, BLOCK_D)
    v = load_rows(v_ptr + wide_key_head * stride_v_head, keys, stride_v_token, valid, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    grad_scale = scale
    if rng_ptr is not None:
        grad_scale *= drop_scale  # which the scores' gradients in the loop lack
    ds_sums = tl.zeros([BLOCK], tl.float32)
    columns = spread(keys - starts)[:, None]  # right for the queries that see the key
    ONCE: tl.constexpr = BLOCK == ROWS  # as in attention_short_forward.py
    for member in tl.range(0, GROUP):
        head = key_head * GROUP + member
        wide_head = head.to(tl.int64)
        for start_m in tl.range(0 if ONCE else first, ROWS if ONCE else last, ROWS):
            tokens = (first if ONCE else start_m) + tl.arange(0, ROWS)
            mask_m = tokens < last
            # Past the tile all of these and the query are 0, which adds nothing.
            log_sum, base, row_starts, one, two = load_record(
                record_ptr, wide_head * total_tokens + tokens, mask_m
            )
            q = load_rows(
                q_ptr + wide_head * stride_q_head, tokens, stride_q_token, mask_m, D, BLOCK_D
            )
            dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D)
            s = tl.dot(k, q.T, input_precision=PRECISION)
            s = tl.where(starts[:, None] == row_starts[None, :], s, float("-inf"))
            p = probabilities(s, base[None, :], log_sum[None, :], scale * LOG2_E)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            kept = p
            if rng_ptr is not None:
                keep = is_kept((one[None, :], two[None, :]), columns, threshold)
                kept = tl.where(keep, p, 0.0)
            dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = kept * dp
            ds -= p * tl.sum(ds, 0)[None, :]
            if sums_ptr is not None:
                ds_sums += tl.sum(ds, 1)
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            dq = tl.dot(ds.T, k, input_precision=PRECISION) * grad_scale
            store_rows(dq_ptr + head * D, tokens, stride_dq, mask_m, dq, D, BLOCK_D)
    dk *= grad_scale
    if rng_ptr is not None:
        dv *= drop_scale
    store_rows(dk_ptr + key_head * D, keys, stride_dkv, valid, dk, D, BLOCK_D)
    store_rows(dv_ptr + key_head * D, keys, stride_dkv, valid, dv, D, BLOCK_D)
    if sums_ptr is not None:
        sums = sums_ptr + (tl.program_id(0) * 3 * H + key_head).to(tl.int64) * D
        dq_sum = tl.sum(ds_sums[:, None] * k.to(tl.float32), 0) * grad_scale
        store_sums(sums, dq_sum, D, BLOCK_D)
        store_sums(sums + 2 * H * D, tl.sum(dv, 0), D, BLOCK_D)
