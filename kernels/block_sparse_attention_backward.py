"""The kernels of block-sparse attention's backward.

Tiling: for the queries' records and for dq, one program is (tile of queries, sequence, head), as in the forward. For dk
and dv it is (tile of keys, sequence, head), and goes through the rows that name its block. Two kernels compute dq, and
dk and dv, so nothing is added atomically, and all sums have one order.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    is_large,
    load_record_once,
    load_rows,
    probabilities,
    score_gradients,
    store_record,
    store_rows,
    with_columns,
)
from fastenc.kernels.block_sparse_attention_tile import (
    VARYING,
    plan_entry,
    program,
    tile_scores,
    tile_tokens,
)


@triton.jit(do_not_specialize=VARYING)
def block_sparse_record_kernel(
    q_ptr,
    k_ptr,
    out_ptr,  # (total_q, H, D), contiguous
    dout_ptr,  # as out
    lse_ptr,  # (H, total_q), float32
    record_ptr,  # (H, total_q, RECORD), int32
    starts_ptr,
    blocks_ptr,
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries' records, with sum_d out dout as their second word.

    Where rounding lse would show in the probabilities, they are divided by their sum, which this kernel forms.
    """
    start, block, first, length, head, begin, end = program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    offs_m, mask_m = tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tokens = first + offs_m
    indices = head.to(tl.int64) * total_q + tokens
    out = load_rows(out_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1).to(tl.int32, bitcast=True)
    base = tl.load(lse_ptr + indices, mask=mask_m, other=0.0)
    sums = tl.full([BLOCK], 1.0, tl.float32)
    large = is_large(base)
    if tl.max(large.to(tl.int32), 0) > 0:
        q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
        k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for index in tl.range(begin * per_block, end * per_block):
            start_n, keys, log_count = plan_entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
            columns, valid = tile_tokens(start_n, keys, length, SIZE, BLOCK)
            k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
            s = tile_scores(q, k, valid, scale, log_count, PRECISION)
            maxima, total = with_columns(maxima, total, s, LOG2_E)
        base = tl.where(large, maxima, base)
        sums = tl.where(large, total, sums)
    store_record(
        record_ptr, tl.math.log2(sums), base, delta, None, head, tokens, indices, mask_m
    )  # fmt: skip


@triton.jit
def _tile_gradients(
    q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(probabilities, gradients of the scores), queries by keys."""
    log_sum, base, delta, _, _ = load_record_once(record_ptr, statistics + offs_m, mask_m)
    base = tl.where(mask_m, base, float("inf"))  # no query has no probabilities
    s = tile_scores(q, k, valid, scale, log_count, PRECISION)
    p = probabilities(s, base[:, None], log_sum[:, None], LOG2_E)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    delta = delta.to(tl.float32, bitcast=True)
    return score_gradients(p, dp, delta[:, None], offs_m[:, None], (None, 0))


@triton.jit(do_not_specialize=VARYING)
def block_sparse_bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dk_ptr,  # (total_q, H, D), heads next to each other
    dv_ptr,
    record_ptr,
    starts_ptr,  # of the entries sorted by the blocks of keys
    blocks_ptr,  # the blocks of queries
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dk and dv
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, block, first, length, head, begin, end = program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    columns, valid = tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
    v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_m, queries, log_count = plan_entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        offs_m, mask_m = tile_tokens(start_m, queries, length, SIZE, BLOCK)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
        p, ds = _tile_gradients(
            q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count, PRECISION
        )  # fmt: skip
        dv = tl.dot(p.to(dout.dtype).T, dout, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    offset = first.to(tl.int64) * stride_grad + head * D
    store_rows(dk_ptr + offset, columns, stride_grad, valid, dk * scale, D, BLOCK_D)
    store_rows(dv_ptr + offset, columns, stride_grad, valid, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=VARYING)
def block_sparse_bwd_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,  # (total_q, H, D), heads next to each other
    record_ptr,
    starts_ptr,
    blocks_ptr,
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dq
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, block, first, length, head, begin, end = program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    offs_m, mask_m = tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
    dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_n, keys, log_count = plan_entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        columns, valid = tile_tokens(start_n, keys, length, SIZE, BLOCK)
        k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
        _, ds = _tile_gradients(
            q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count, PRECISION
        )  # fmt: skip
        dq = tl.dot(ds.to(q.dtype), k, dq, input_precision=PRECISION)
    offset = first.to(tl.int64) * stride_grad + head * D
    store_rows(dq_ptr + offset, offs_m, stride_grad, mask_m, dq * scale, D, BLOCK_D)
