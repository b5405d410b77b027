"""The kernels of attention's backward.

Tiling: one program takes a block of keys. It computes the probabilities again from the queries' records
(attention_delta.py) and keeps dk and dv in registers. It adds dq atomically in float32. Where results must be
deterministic, or where it is faster, a second kernel with one program for each block of queries computes dq instead.

With grouped queries a program takes its block of keys through the queries of all GROUP heads that read them, one head
after the other, so that dk and dv are sums in a fixed order.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_arguments import VARYING
from fastenc.kernels.attention_grid import program, visible_blocks
from fastenc.kernels.attention_tile import (
    head_rows,
    load_keys,
    load_record,
    load_record_once,
    load_rows,
    probabilities,
    score_gradients,
    score_unit,
    sequence_bounds,
    sequence_keys,
    store_rows,
    store_sums,
    tile_scores,
)


@triton.jit
def _row_offsets(rows, stride, BLOCK_D: tl.constexpr):
    """(len(rows), BLOCK_D): the elements' distances from the first row's begin."""
    return rows.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _slot(
    first, sequence, block, head, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The index of a block's sums: first // BLOCK + sequence + block differs for any two blocks of the batch."""
    return ((first // BLOCK + sequence + block).to(tl.int64) * 3 * H + head) * D


@triton.jit(do_not_specialize=VARYING)
def attention_bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,  # (total_q, H, D), contiguous
    wide_dq_ptr,  # (total_q, H, D), float32, contiguous, zeroed; None to leave dq to the kernel below
    finished_ptr,  # (batch, H // GROUP), int32, zeroed: programs that have added to dq; None where wide_dq_ptr is
    dq_ptr,  # (total_q, H, D), heads next to each other
    dk_ptr,  # (total_k, H // GROUP, D), as dq
    dv_ptr,
    sums_ptr,  # (slots, 3, H, D), float32, zeroed: sums of dq and dv over a block; dk's are 0. Or None, as if GROUP > 1
    record_ptr,  # (H, total_q, RECORD), int32: by attention_delta.py
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rng_ptr,  # None without dropout; not read
    alibi_ptr,
    relative_ptr,
    key_bias_ptr,
    blocks_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_dq,  # of tokens
    stride_dkv,
    total_q,
    blocks,  # of the longest sequence
    scale,
    threshold,
    drop_scale,
    span,
    left,
    right,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KEY_HEADS: tl.constexpr = H // GROUP
    block, sequence, key_head = program(blocks_ptr, blocks, KEY_HEADS, BLOCK_N)
    start_n = block * BLOCK_N
    first_k, length_k = sequence_bounds(cu_seqlens_k_ptr, sequence)
    if start_n >= length_k:
        return
    first_q, length_q = sequence_bounds(cu_seqlens_q_ptr, sequence)
    shift = length_k - length_q
    keys = sequence_keys(
        k_ptr, v_ptr, stride_k_token, stride_k_head, stride_v_token, stride_v_head, first_k, length_k, key_head
    )  # fmt: skip
    columns = start_n + tl.arange(0, BLOCK_N)
    k, v = load_keys(keys, columns, True, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    NATURAL: tl.constexpr = WINDOW or not (
        alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    )
    start, stop = visible_blocks(start_n - shift, length_q, right, left, BLOCK_M, BLOCK_N, WINDOW)
    for member in tl.range(0, GROUP):
        head = key_head * GROUP + member
        biases = (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_k)
        unit = score_unit(scale, biases, WINDOW)
        q_base = head_rows(q_ptr, first_q, stride_q_token, head, stride_q_head)
        dout_base = dout_ptr + first_q.to(tl.int64) * (H * D) + head * D
        statistics = head.to(tl.int64) * total_q + first_q
        for start_m in tl.range(start, stop, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < length_q
            q = load_rows(q_base, offs_m, stride_q_token, mask_m, D, BLOCK_D)
            dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
            log_sum, base, second, one, two = load_record(record_ptr, statistics + offs_m, mask_m)
            if NATURAL:  # past the last query, products are 0, but scores are biases of any size
                base = tl.where(mask_m, base, float("inf"))
            delta = second.to(tl.float32, bitcast=True)
            dropout = (None, threshold)
            if rng_ptr is not None:
                dropout = ((one[None, :], two[None, :]), threshold)
            # Keys by queries: what the next products take on their left stays in registers.
            s = tl.dot(k, q.T, input_precision=PRECISION)
            s = tile_scores(
                s,
                (offs_m + shift)[None, :],
                columns[:, None],
                length_k,
                scale,
                biases,
                WINDOW,
                True,
            )
            p = probabilities(s, base[None, :], log_sum[None, :], unit)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            kept, ds = score_gradients(p, dp, delta[None, :], columns[:, None], dropout)
            dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if wide_dq_ptr is not None:
                dq = tl.dot(ds.T, k, input_precision=PRECISION)
                wide_dq = wide_dq_ptr + first_q.to(tl.int64) * (H * D) + head * D
                pointers = wide_dq + _row_offsets(offs_m, H * D, BLOCK_D)
                mask = mask_m[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
                tl.atomic_add(pointers, dq, mask=mask, sem="relaxed")
    grad_start = first_k.to(tl.int64) * stride_dkv + key_head * D
    mask_n = columns < length_k
    if rng_ptr is not None:
        scale *= drop_scale
        dv *= drop_scale
    dk *= scale
    store_rows(dk_ptr + grad_start, columns, stride_dkv, mask_n, dk, D, BLOCK_D)
    store_rows(dv_ptr + grad_start, columns, stride_dkv, mask_n, dv, D, BLOCK_D)
    if sums_ptr is not None:
        sums = sums_ptr + _slot(first_k, sequence, block, key_head, H, D, BLOCK_N)
        store_sums(sums + 2 * H * D, tl.sum(dv, 0), D, BLOCK_D)
    if wide_dq_ptr is not None:
        # The last of the sequence's programs finds what all of them added to dq, in the L2 cache.
        tl.debug_barrier()
        before = tl.atomic_add(finished_ptr + sequence * KEY_HEADS + key_head, 1, sem="acq_rel")
        if before == tl.cdiv(length_k, BLOCK_N) - 1:
            for member in tl.range(0, GROUP):
                head = key_head * GROUP + member
                wide_dq = wide_dq_ptr + first_q.to(tl.int64) * (H * D) + head * D
                dq_start = first_q.to(tl.int64) * stride_dq + head * D
                dq_sum = tl.zeros([BLOCK_D], tl.float32)
                for start_m in tl.range(0, length_q, BLOCK_M):
                    offs_m = start_m + tl.arange(0, BLOCK_M)
                    mask_m = offs_m < length_q
                    mask = mask_m[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
                    pointers = wide_dq + _row_offsets(offs_m, H * D, BLOCK_D)
                    dq = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg") * scale
                    store_rows(dq_ptr + dq_start, offs_m, stride_dq, mask_m, dq, D, BLOCK_D)
                    dq_sum += tl.sum(dq, 0)
                if sums_ptr is not None:
                    sums = sums_ptr + _slot(first_q, sequence, 0, head, H, D, BLOCK_N)
                    store_sums(sums, dq_sum, D, BLOCK_D)


@triton.jit
def _query_gradient_blocks(
    dq, q, dout, base, log_sum, delta, rows, start, stop, keys, biases, dropout, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq with the keys from start to stop added; it lacks the scores' scale."""
    length_k = keys[4]
    for start_n in tl.range(start, stop, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k, v = load_keys(keys, columns, MASKED, D, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tile_scores(s, rows[:, None], columns[None, :], length_k, scale, biases, WINDOW, MASKED)
        unit = score_unit(scale, biases, WINDOW)
        p = probabilities(s, base[:, None], log_sum[:, None], unit)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        _, ds = score_gradients(p, dp, delta[:, None], columns[None, :], dropout)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=VARYING)
def attention_bwd_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,  # (total_q, H, D), heads next to each other
    sums_ptr,  # as in the kernel above
    record_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rng_ptr,  # None without dropout; not read
    alibi_ptr,
    relative_ptr,
    key_bias_ptr,
    blocks_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_dq,  # of tokens
    total_q,
    blocks,  # of the longest sequence
    scale,
    threshold,
    drop_scale,
    span,
    left,
    right,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, sequence, head = program(blocks_ptr, blocks, H, BLOCK_M)
    start_m = block * BLOCK_M
    first_q, length_q = sequence_bounds(cu_seqlens_q_ptr, sequence)
    if start_m >= length_q:
        return
    first_k, length_k = sequence_bounds(cu_seqlens_k_ptr, sequence)
    shift = length_k - length_q
    keys = sequence_keys(
        k_ptr, v_ptr, stride_k_token, stride_k_head, stride_v_token, stride_v_head, first_k, length_k, head // GROUP
    )  # fmt: skip
    biases = (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_k)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length_q
    rows = offs_m + shift
    q_base = head_rows(q_ptr, first_q, stride_q_token, head, stride_q_head)
    dout_base = dout_ptr + first_q.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first_q
    q = load_rows(q_base, offs_m, stride_q_token, mask_m, D, BLOCK_D)
    dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
    log_sum, base, second, one, two = load_record_once(record_ptr, statistics + offs_m, mask_m)
    base = tl.where(mask_m, base, float("inf"))
    delta = second.to(tl.float32, bitcast=True)
    dropout = (None, threshold)
    if rng_ptr is not None:
        dropout = ((one[:, None], two[:, None]), threshold)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = visible_blocks(start_m + shift, length_k, left, right, BLOCK_N, BLOCK_M, WINDOW)
    if not WINDOW:
        whole = length_k // BLOCK_N * BLOCK_N
        dq = _query_gradient_blocks(
            dq, q, dout, base, log_sum, delta, rows, start, whole, keys, biases, dropout, scale,
            D, BLOCK_D, BLOCK_N, WINDOW, False, PRECISION,
        )  # fmt: skip
        start = whole
    dq = _query_gradient_blocks(
        dq, q, dout, base, log_sum, delta, rows, start, stop, keys, biases, dropout, scale,
        D, BLOCK_D, BLOCK_N, WINDOW, True, PRECISION,
    )  # fmt: skip
    grad_base = dq_ptr + first_q.to(tl.int64) * stride_dq + head * D
    if rng_ptr is not None:
        scale *= drop_scale
    dq *= scale
    store_rows(grad_base, offs_m, stride_dq, mask_m, dq, D, BLOCK_D)
    if sums_ptr is not None:
        sums = sums_ptr + _slot(first_q, sequence, block, head, H, D, BLOCK_M)
        store_sums(sums, tl.sum(dq, 0), D, BLOCK_D)
