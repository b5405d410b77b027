"""Non-causal attention over packed sequences of any length, forward and backward, by online softmax.

    out = dropout(softmax(s)) v,  s = scale * q k^T + bias inside each sequence;  lse = log sum_j exp(s_j)

Tiling: one program is (block of BLOCK_M queries, sequence, head). It reads the keys inside its window, BLOCK_N at a
time, with a running row maximum and row sum. Without a window only the last block is masked. Blocks past a sequence's
end exit at once, so the grid depends on max_seqlen only and nothing is read back from the device.

The backward has one program for each block of keys. It computes the probabilities again from lse and keeps dk and dv in
registers. It adds dq atomically in float32. Where results must be deterministic, or where it is faster, a second kernel
with one program for each block of queries computes dq instead.

With grouped queries, GROUP heads of q read one head of k and v, and nothing is copied. A program of the backward takes
a block of keys through the queries of all these heads, one head after the other, so that dk and dv are sums in a fixed
order.

q, k and v have separate strides. So a packed qkv is read in place, and its gradient is written in place.
Bytes: forward reads q, k, v and writes out, 4 T H D elements. FLOPs: 4 H D sum(length^2) forward, 10 backward.
Source: Dao 2023, arXiv:2307.08691.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastenc.kernels import attention_short
from fastenc.kernels.attention_call import AttentionCall
from fastenc.kernels.attention_relative import config as relative_config
from fastenc.kernels.attention_relative import relative_bias_gradient
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    is_large,
    load_keys,
    load_record,
    load_record_once,
    load_rows,
    natural_lse,
    new_record,
    probabilities,
    scaled,
    score_gradients,
    score_unit,
    sequence_bounds,
    sequence_keys,
    shape_constants,
    store_record,
    store_rows,
    store_sums,
    tile_scores,
    unit_of,
    with_keys,
)
from fastenc.kernels.batch_invariance import is_batch_invariant
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread, threshold_and_scale
from fastenc.kernels.launch import tunable, warp_groups
from fastenc.kernels.rotary import rotary as rotated
from fastenc.kernels.rotary import rotate_into
from fastenc.kernels.run import run
from torch import Tensor

# Numbers that change from batch to batch. A second variant of each kernel for multiples of 16 would gain nothing.
VARYING = ["total_q", "blocks", "threshold", "span", "left", "right"]
UNLIMITED = 2**30  # tokens of a window
TABLE_BLOCK = tl.constexpr(64)  # tokens of an entry of attention_blocks.py's tables


@triton.jit
def _program(blocks_ptr, blocks, H: tl.constexpr, BLOCK: tl.constexpr):
    """(block of BLOCK tokens, sequence, head).

    From a table of blocks of TABLE_BLOCK tokens, all heads of a block beside each other; or, without one, in a grid of
    (blocks * batch, heads): only its first axis is longer than 65,535.
    """
    if blocks_ptr is None:
        return tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.program_id(1)
    else:
        EACH: tl.constexpr = max(1, TABLE_BLOCK // BLOCK)
        index = tl.program_id(0) // H
        entry = blocks_ptr + index // EACH * 2
        start = tl.load(entry + 1) * TABLE_BLOCK + index % EACH * BLOCK
        # Entries that share a larger block: the first has it, the others get one past every sequence's end.
        block = tl.where(start % BLOCK == 0, start // BLOCK, 2147483647 // BLOCK)
        return block, tl.load(entry), tl.program_id(0) % H


@triton.jit
def _row_pointers(rows, stride, BLOCK_D: tl.constexpr):
    return rows.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _slot(
    first, sequence, block, head, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The index of a block's sums: first // BLOCK + sequence + block differs for any two blocks of the batch."""
    return ((first // BLOCK + sequence + block).to(tl.int64) * 3 * H + head) * D


@triton.jit
def _visible_blocks(
    row, length, before, after, BLOCK: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr
):
    """Of `length` rows, the (first, end) that `SIZE` rows from `row` on can see; first a multiple of BLOCK."""
    if WINDOW:
        first = tl.maximum(0, row - before) // BLOCK * BLOCK
        return first, tl.minimum(length, row + SIZE + after)
    return row * 0, length


@triton.jit
def _forward_blocks(
    acc, row_max, row_sum, q, rows, start, stop, keys, biases, dropout, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, NATURAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys from start to stop; acc lacks dropout's scale.

    row_max: of natural scores, or of products in units of log2.
    """
    query_keys, threshold = dropout
    for start_n in tl.range(start, stop, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k, v = load_keys(keys, columns, MASKED, D, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tile_scores(s, rows[:, None], columns[None, :], keys[4], scale, biases, WINDOW, MASKED)
        new_max = tl.max(s, 1)
        if not NATURAL:
            new_max = scaled(new_max, scale * LOG2_E)
        new_max = tl.maximum(row_max, new_max)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # of a row that saw no key yet
        if NATURAL:
            exponents, change = (s - base[:, None]) * LOG2_E, (row_max - base) * LOG2_E
        else:
            unit = unit_of(base, scale * LOG2_E)
            exponents, change = s * unit[:, None] - base[:, None], row_max - base
        p, rescale = tl.math.exp2(exponents), tl.math.exp2(change)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if query_keys is not None:
            p = tl.where(is_kept(query_keys, spread(columns)[None, :], threshold), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=VARYING)
def _attention_fwd_kernel(
    q_ptr,  # (total_q, H, D)
    k_ptr,  # (total_k, H // GROUP, D)
    v_ptr,  # as k
    out_ptr,  # (total_q, H, D), contiguous
    lse_ptr,  # (H, total_q), float32
    cu_seqlens_q_ptr,  # (batch+1,), int32
    cu_seqlens_k_ptr,  # (batch+1,), int32
    rng_ptr,  # (2,), int64: seed and offset, or None
    alibi_ptr,  # (H,), or None
    relative_ptr,  # (H, 2 * span + 1), or None
    key_bias_ptr,  # (total_k,), or None
    blocks_ptr,  # (entries, 2), int32: by attention_blocks.py, or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
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
    block, sequence, head = _program(blocks_ptr, blocks, H, BLOCK_M)
    start_m = block * BLOCK_M
    first_q, length_q = sequence_bounds(cu_seqlens_q_ptr, sequence)
    tl.device_assert(length_q <= blocks * BLOCK_M, "a sequence is longer than max_seqlen")
    if blocks_ptr is None:
        last_q = tl.load(cu_seqlens_q_ptr + tl.num_programs(0) // blocks)
        tl.device_assert(last_q == total_q, "cu_seqlens ends before the last token")
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
    rows, tokens = offs_m + shift, first_q + offs_m
    dropout = (None, threshold)
    if rng_ptr is not None:
        dropout = (row_keys(load_rng(rng_ptr), head, tokens[:, None]), threshold)
    q_base = head_rows(q_ptr, first_q, stride_q_token, head, stride_q_head)
    q = load_rows(q_base, offs_m, stride_q_token, mask_m, D, BLOCK_D)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = _visible_blocks(start_m + shift, length_k, left, right, BLOCK_N, BLOCK_M, WINDOW)
    NATURAL: tl.constexpr = WINDOW or not (
        alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    )
    if not WINDOW:
        whole = length_k // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = _forward_blocks(
            acc, row_max, row_sum, q, rows, start, whole, keys, biases, dropout, scale,
            D, BLOCK_D, BLOCK_N, WINDOW, NATURAL, False, PRECISION,
        )  # fmt: skip
        start = whole
    acc, row_max, row_sum = _forward_blocks(
        acc, row_max, row_sum, q, rows, start, stop, keys, biases, dropout, scale,
        D, BLOCK_D, BLOCK_N, WINDOW, NATURAL, True, PRECISION,
    )  # fmt: skip
    unseen = row_sum == 0.0
    row_sum = tl.where(unseen, 1.0, row_sum)
    out_base = out_ptr + first_q.to(tl.int64) * (H * D) + head * D
    if rng_ptr is not None:
        acc *= drop_scale
    store_rows(out_base, offs_m, H * D, mask_m, acc / row_sum[:, None], D, BLOCK_D)
    log_sum = tl.math.log2(row_sum) / LOG2_E
    lse = row_max + log_sum if NATURAL else natural_lse(row_max, row_sum, scale)
    lse = tl.where(unseen, float("-inf"), lse)
    tl.store(lse_ptr + head.to(tl.int64) * total_q + tokens, lse, mask=mask_m)


@triton.jit
def _maxima_and_sums(
    q, rows, start, stop, keys, biases, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of tile_scores' results over keys from start to stop: (maxima, sums of exponentials above them).

    Keys by queries, as in the backward: a product that is rounded differently there is off by a factor of the
    probability.
    """
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    unit = score_unit(scale, biases, WINDOW)
    for start_n in tl.range(start, stop, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k_base, _, stride_k_token, _, length_k = keys
        k = load_rows(k_base, columns, stride_k_token, columns < length_k, D, BLOCK_D)
        s = tl.dot(k, q.T, input_precision=PRECISION)
        s = tile_scores(s, rows[None, :], columns[:, None], length_k, scale, biases, WINDOW, True)
        maxima, sums = with_keys(maxima, sums, s, unit)
    return maxima, sums


@triton.jit(do_not_specialize=["total_q", "blocks", "span", "left", "right"])
def _attention_delta_kernel(
    out_ptr,  # (total_q, H, D), contiguous
    dout_ptr,
    dlse_ptr,  # (H, total_q), float32, or None
    lse_ptr,  # (H, total_q), float32
    record_ptr,  # (H, total_q, RECORD), int32
    q_ptr,
    k_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rng_ptr,  # or None
    alibi_ptr,
    relative_ptr,
    key_bias_ptr,
    blocks_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    total_q,
    blocks,  # of the longest sequence
    scale,
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
    """The queries' records, with delta / drop_scale as their second word.

    delta[h, i] = sum_d out[i, h, d] * dout[i, h, d] - dlse[h, i]; the sum is sum_j p_ij dp_ij, dropout included.
    """
    block, sequence, head = _program(blocks_ptr, blocks, H, BLOCK_M)
    start_m = block * BLOCK_M
    first_q, length_q = sequence_bounds(cu_seqlens_q_ptr, sequence)
    if start_m >= length_q:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length_q
    tokens = first_q + offs_m
    indices = head.to(tl.int64) * total_q + tokens
    out = load_rows(out_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + indices, mask=mask_m, other=0.0)
    lse = tl.load(lse_ptr + indices, mask=mask_m, other=0.0)
    large = is_large(lse)
    lse = tl.where(large, 0.0, lse)
    NATURAL: tl.constexpr = WINDOW or not (
        alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    )
    if NATURAL:  # nothing is rounded before the subtraction from a score
        log_sum = tl.zeros([BLOCK_M], tl.float32)
        base = tl.where(lse == float("-inf"), float("inf"), lse)  # a query that saw no key
    else:
        log_sum, base = lse * LOG2_E, tl.zeros([BLOCK_M], tl.float32)
    if tl.max(large.to(tl.int32), 0) > 0:
        first_k, length_k = sequence_bounds(cu_seqlens_k_ptr, sequence)
        shift = length_k - length_q
        keys = sequence_keys(
            k_ptr, k_ptr, stride_k_token, stride_k_head, stride_k_token, stride_k_head, first_k, length_k, head // GROUP
        )  # fmt: skip
        biases = (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_k)
        q_base = head_rows(q_ptr, first_q, stride_q_token, head, stride_q_head)
        q = load_rows(q_base, offs_m, stride_q_token, mask_m, D, BLOCK_D)
        start, stop = _visible_blocks(
            start_m + shift, length_k, left, right, BLOCK_N, BLOCK_M, WINDOW
        )
        maxima, sums = _maxima_and_sums(
            q, offs_m + shift, start, stop, keys, biases, scale,
            D, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, PRECISION,
        )  # fmt: skip
        log_sum = tl.where(large, tl.math.log2(tl.where(large, sums, 1.0)), log_sum)
        base = tl.where(large, maxima, base)
    rng = None
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
        delta /= drop_scale
    delta = delta.to(tl.int32, bitcast=True)
    store_record(record_ptr, log_sum, base, delta, rng, head, tokens, indices, mask_m)


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,  # (total_q, H, D), contiguous
    wide_dq_ptr,  # (total_q, H, D), float32, contiguous, zeroed; None to leave dq to its of_grid kernel
    finished_ptr,  # (batch, H // GROUP), int32, zeroed: programs that have added to dq; None like wide_dq_ptr
    dq_ptr,  # (total_q, H, D), heads next to each other
    dk_ptr,  # (total_k, H // GROUP, D), as dq
    dv_ptr,
    sums_ptr,  # if GROUP is 1: (slots, 3, H, D), float32, zeroed: of dq and dv over tokens; dk's are 0; or None
    record_ptr,  # (H, total_q, RECORD), int32: by _attention_delta_kernel
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
    block, sequence, key_head = _program(blocks_ptr, blocks, KEY_HEADS, BLOCK_N)
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
    start, stop = _visible_blocks(start_n - shift, length_q, right, left, BLOCK_M, BLOCK_N, WINDOW)
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
            if (
                NATURAL
            ):  # the scores of no query are its biases, of any size; products with it are 0
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
                pointers = wide_dq + _row_pointers(offs_m, H * D, BLOCK_D)
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
                    pointers = wide_dq + _row_pointers(offs_m, H * D, BLOCK_D)
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
    for start_n in tl.range(start, stop, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k, v = load_keys(keys, columns, MASKED, D, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tile_scores(s, rows[:, None], columns[None, :], keys[4], scale, biases, WINDOW, MASKED)
        unit = score_unit(scale, biases, WINDOW)
        p = probabilities(s, base[:, None], log_sum[:, None], unit)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        _, ds = score_gradients(p, dp, delta[:, None], columns[None, :], dropout)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=VARYING)
def _attention_bwd_q_kernel(
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
    block, sequence, head = _program(blocks_ptr, blocks, H, BLOCK_M)
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
    start, stop = _visible_blocks(start_m + shift, length_k, left, right, BLOCK_N, BLOCK_M, WINDOW)
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


def _launch(
    block_m: int, block_n: int, num_warps: int, num_stages: int = 2, maxnreg: int | None = None
) -> dict:
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
    return {**tile, "num_stages": num_stages, "maxnreg": maxnreg}


# Launches of backward_kv to try. Fewer registers leave room for more programs on a multiprocessor.
_BACKWARD = (
    _launch(64, 64, 4, 3),
    _launch(32, 64, 4, 3, 168),
    _launch(64, 64, 4, 2, 168),
    _launch(32, 128, 8, 2, 128),
    _launch(64, 128, 4, 3),
)


@tunable(
    "attention",
    bucketed=("max_seqlen",),
    candidates=(
        # Two kernels add nothing atomically, and compute the scores twice.
        *({**launch, "ATOMIC": atomic} for launch, atomic in product(_BACKWARD, (True, False))),
        _launch(64, 64, 4, 3),
        _launch(128, 64, 8, 3, 128),
    ),
    num_stages=(2, 3, 4),
)
def config(
    kernel: str, head_dim: int, precision: str, biased: bool, warp_groups: bool, dropout: bool
) -> dict:
    """Launch parameters of "forward", "backward_kv" or "backward_q" where no table has better ones.

    precision: "half" for 2-byte types, else the precision of float32 products. biased: there is a window or a bias.
    warp_groups: the device's matrix instructions run on groups of four warps (wgmma), which needs tiles of 64 rows.

    "backward_kv" has ATOMIC: whether it adds dq atomically; if not, "backward_q" computes it.

    64 query rows take 4 warps, because 8 warps would compute each softmax twice. Without warp groups backward_kv, which
    keeps two accumulators and five operands, takes 32 rows at a time: 64 rows spill.
    """
    if warp_groups and precision == "half" and head_dim <= 64 and not biased:
        return _of_warp_groups(kernel, head_dim, dropout)
    launch = _tile_and_warps(kernel, head_dim, precision, biased)
    return {**launch, "ATOMIC": True} if kernel == "backward_kv" else launch


def _of_warp_groups(kernel: str, head_dim: int, dropout: bool) -> dict:
    """The fastest of those measured on an H200.

    Two programs fit on a multiprocessor; one larger program is slower, although it reads less from the L2 cache.
    """
    if kernel != "backward_kv":
        return _launch(128, 64, 8, 3, maxnreg=128 if kernel == "forward" else None)
    if dropout or head_dim > 32:
        # Computing the scores twice is cheaper than adding dq atomically, but with dropout the mask costs more.
        return {**_launch(64, 64, 4, 3), "ATOMIC": dropout}
    return {**_launch(64, 128, 4, 3), "ATOMIC": True}


def _tile_and_warps(kernel: str, head_dim: int, precision: str, biased: bool) -> dict:
    if head_dim > 128:
        return _of_wide_heads(kernel)
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles spill.
        if kernel == "backward_kv":
            return _launch(16, 16, 8)
        return _launch(32, 32, 8) if head_dim <= 64 else _launch(32, 16, 8)
    if head_dim > 64 and precision == "tf32":
        return _launch(32, 16 if kernel == "backward_kv" else 32, 4)
    if kernel == "backward_kv" and head_dim > 64:
        return _launch(32, 64, 8) if head_dim > 96 else _launch(32, 32, 8 if biased else 4)
    if kernel == "backward_kv":
        return _launch(32, 32 if precision == "tf32" and head_dim > 32 else 64, 4)
    # A bias and TF32 take registers as a wider head does.
    if head_dim > 64 or (head_dim > 32) + biased + (precision == "tf32") >= 2:
        return _launch(64, 32, 4)
    return _launch(64, 64, 4)


def _of_wide_heads(kernel: str) -> dict:
    """Of more than 128 columns, in 2-byte types: eight warps hold 32 rows of 256 floats twice, as dk and dv."""
    if kernel == "backward_kv":
        return _launch(16, 32, 8)
    return _launch(64 if kernel == "forward" else 32, 32, 8)


def config_delta(head_dim: int, precision: str, biased: bool) -> dict:
    """Launch parameters of the kernel of delta: its branch for large scores shall not take the registers of the rest.

    precision, biased: as for the others.
    """
    if precision == "ieee":
        # Wide heads take about 170 registers: three programs of four warps fit on a multiprocessor, or one of eight.
        block_m, warps = (16, 8) if head_dim <= 64 else (8, 4)
        return {"BLOCK_M": block_m, "BLOCK_N": 16, "num_warps": warps}
    if precision == "half" and head_dim <= 64 and not biased:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}
    block_n = 64 if precision == "half" and head_dim <= 128 else 32
    return {"BLOCK_M": 32 if head_dim <= 128 else 16, "BLOCK_N": block_n, "num_warps": 4}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, biased in product(
        (32, 64, 96, 128, 256), ("half", "tf32", "ieee"), (False, True)
    ):
        if dim > 128 and precision != "half":
            continue
        dtype = "bfloat16" if precision == "half" else "float32"
        key = {"head_dim": dim, "precision": precision, "biased": biased, "dtype": dtype}
        for kernel in ("forward", "backward_kv", "backward_q"):
            yield {"kernel": kernel, **key, "dropout": True}
    for kernel, dropout in product(("forward", "backward_kv", "backward_q"), (False, True)):
        key = {"kernel": kernel, "head_dim": 64, "precision": "half", "biased": False}
        yield {**key, "dropout": dropout, "dtype": "float16"}
    key = {"kernel": "backward_kv", "head_dim": 32, "precision": "half", "biased": False}
    yield {**key, "dropout": False, "dtype": "bfloat16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel = {
        "forward": _attention_fwd_kernel,
        "backward_q": _attention_bwd_q_kernel,
        "backward_kv": _attention_bwd_kv_kernel,
    }[key["kernel"]]
    constants = {**shape_constants(key), "WINDOW": key["biased"]}
    without_biases = dict.fromkeys(("alibi_ptr", "relative_ptr", "key_bias_ptr"))
    if not key["biased"]:
        constants |= without_biases
    yield "", kernel, constants
    if key["head_dim"] == 64 and not key["biased"] and key["precision"] == "half":
        yield " in a grid", kernel, {**constants, "blocks_ptr": None}
    if key["head_dim"] != 64:  # one head_dim stands for all in the variants below
        return
    if key["dtype"] == "bfloat16":
        yield " of shared keys", kernel, {**constants, "GROUP": 3, "sums_ptr": None}
    if key["kernel"] == "backward_kv":
        yield " alone", kernel, {**constants, "wide_dq_ptr": None, "finished_ptr": None}
    if key["biased"] and key["precision"] == "half":
        yield " window alone", kernel, {**constants, **without_biases}
        for name in without_biases:
            others = dict.fromkeys(other for other in without_biases if other != name)
            yield f" {name} alone", kernel, {**constants, **others, "WINDOW": False}
        # T5's decoder: a causal window and a relative bias.
        others = dict.fromkeys(("alibi_ptr", "key_bias_ptr"))
        yield " window and relative_ptr alone", kernel, {**constants, **others}


def _config(kernel: str, max_seqlen: int, arguments: dict) -> dict:
    return config(
        kernel,
        arguments["D"],
        _precision(arguments),
        _biased(arguments),
        warp_groups(arguments["q_ptr"].device),
        arguments["threshold"] > 0,
        like=arguments["q_ptr"],
        max_seqlen=max_seqlen,
    )


def _precision(arguments: dict) -> str:
    return arguments["PRECISION"] if arguments["q_ptr"].dtype == torch.float32 else "half"


def _biased(arguments: dict) -> bool:
    biases = (arguments[name] for name in ("alibi_ptr", "relative_ptr", "key_bias_ptr"))
    return arguments["WINDOW"] or any(bias is not None for bias in biases)


class _Division(NamedTuple):
    """Which kernels take which sequences of a batch.

    Fields:
        short: whether the kernels for short sequences take the short ones.
        any_length: whether the kernels for any length take the others (all, if ``short`` is False).
        blocks: the table of blocks for the kernels for any length, or None for a grid over the longest sequence.
    """

    short: bool
    any_length: bool
    blocks: Tensor | None


def _divide(arguments: dict, attention_call: AttentionCall, widest: int = 128) -> _Division:
    """widest: the widest head for the kernel for short sequences."""
    if is_batch_invariant(arguments["q_ptr"].device.type):
        # In a tile for short sequences, sums depend on where in it a sequence begins. The rule of the other launch
        # does not know the lengths.
        return _Division(False, True, None)
    fits = (
        attention_call.cu_seqlens_k is None
        and arguments["q_ptr"].element_size() == 2  # float32 would not fit in its tiles
        and arguments["D"] <= widest
        and not _biased(arguments)
    )
    if fits and attention_call.max_seqlen_q <= attention_short.LONGEST:
        return _Division(True, False, None)
    if fits and attention_call.long_blocks is not None:
        return _Division(True, True, attention_call.long_blocks)
    return _Division(
        False, True, None if attention_call.cu_seqlens_k is not None else attention_call.all_blocks
    )


def _blocks(
    division: _Division, max_seqlen: int, block: int, arguments: dict, group: int = 1
) -> tuple[dict, tuple]:
    """(arguments, grid) of a kernel whose programs have ``block`` tokens and ``group`` heads of q each."""
    blocks, heads = triton.cdiv(max_seqlen, block), arguments["H"] // group
    of_grid = {"blocks_ptr": division.blocks, "blocks": blocks}
    if division.blocks is None:
        return of_grid, (blocks * (arguments["cu_seqlens_q_ptr"].shape[0] - 1), heads)
    return of_grid, (division.blocks.shape[0] * max(1, TABLE_BLOCK.value // block) * heads,)


def _arguments(q: Tensor, k: Tensor, v: Tensor, attention_call: AttentionCall) -> dict:
    """The arguments and constants that all kernels for any length share."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    threshold, drop_scale = threshold_and_scale(attention_call.dropout_p, attention_call.rng_state)
    heads, head_dim = q.shape[1:]
    cu_seqlens_k = (
        attention_call.cu_seqlens_q
        if attention_call.cu_seqlens_k is None
        else attention_call.cu_seqlens_k
    )
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "cu_seqlens_q_ptr": attention_call.cu_seqlens_q.contiguous(),
        "cu_seqlens_k_ptr": cu_seqlens_k.contiguous(),
        "rng_ptr": attention_call.rng_state if threshold else None,
        "alibi_ptr": _contiguous(attention_call.alibi_slopes),
        "relative_ptr": _contiguous(attention_call.relative_bias),
        "key_bias_ptr": _contiguous(attention_call.key_bias),
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "total_q": q.shape[0],
        "scale": attention_call.scale,
        "threshold": threshold,
        "drop_scale": drop_scale,
        "span": 0
        if attention_call.relative_bias is None
        else attention_call.relative_bias.shape[1] // 2,
        "left": attention_call.window_left if attention_call.window_left >= 0 else UNLIMITED,
        "right": attention_call.window_right if attention_call.window_right >= 0 else UNLIMITED,
        "H": heads,
        "GROUP": heads // k.shape[1] if heads else 1,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        # The variant with a window scales the scores before it masks them and takes their maximum. A scale of 0 or
        # less needs that order.
        "WINDOW": max(attention_call.window_left, attention_call.window_right) >= 0
        or attention_call.scale <= 0,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). ``arguments``: the fields of an AttentionCall."""
    q, k, attention_call = _rotated(q, k, AttentionCall(*arguments))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    shared = _arguments(q, k, v, attention_call)
    division = _divide(shared, attention_call)
    if division.short:
        attention_short.forward(
            out, lse, attention_call.bounds, attention_call.max_seqlen_q, shared
        )
    if division.any_length:
        launch = _config("forward", attention_call.max_seqlen_q, shared)
        of_grid, grid = _blocks(division, attention_call.max_seqlen_q, launch["BLOCK_M"], shared)
        if 0 not in grid:
            run(
                _attention_fwd_kernel,
                grid,
                out_ptr=out,
                lse_ptr=lse,
                **of_grid,
                **shared,
                **launch,
            )
    return out, lse


def _rotated(
    q: Tensor, k: Tensor, attention_call: AttentionCall
) -> tuple[Tensor, Tensor, AttentionCall]:
    """Queries and keys rotated by the angles of their positions, and the call without the table of rotary angles."""
    if attention_call.rotary is None:
        return q, k, attention_call
    if attention_call.cu_seqlens_k is not None:
        raise ValueError(
            "attention: rotary needs queries and keys of the same sequences, got cu_seqlens_k: "
            "rotate them before with fastenc.ops.rotary"
        )
    of_rotation = (
        attention_call.rotary,
        attention_call.cu_seqlens_q,
        attention_call.max_seqlen_q,
        False,
    )
    q, k = (rotated(x, *of_rotation) for x in (q, k))
    return q, k, attention_call._replace(rotary=None)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, drelative_bias, dbias), or if packed (dqkv, empty, empty, drelative_bias, dbias); contiguous.

    rest: the fields of an AttentionCall; then packed, wants_relative_bias and wants_bias.
    """
    *arguments, packed, wants_relative_bias, wants_bias = rest
    attention_call = AttentionCall(*arguments)
    q, k, rotated_call = _rotated(q, k, attention_call)
    # The kernels take the sum of dk over the tokens as 0, because a constant added to all scores of a query changes no
    # probability. That does not hold for keys before their rotation, or with a gradient through lse. With heads that
    # share keys, the sums would not fit in the registers.
    in_kernels = wants_bias and attention_call.rotary is None and dlse is None
    in_kernels = in_kernels and q.shape[1] == k.shape[1]
    wants = (packed, wants_relative_bias, in_kernels)
    *results, dbias = _backward(dout, dlse, out, lse, q, k, v, rotated_call, *wants)
    if attention_call.rotary is not None:
        heads = [x.shape[1] for x in (q, k, v)]
        dq, dk = results[0].split(heads, 1)[:2] if packed else results[:2]
        for gradient in (dq, dk):
            rotate_into(
                gradient,
                gradient,
                attention_call.rotary,
                attention_call.cu_seqlens_q,
                attention_call.max_seqlen_q,
                True,
            )
    if wants_bias and not in_kernels:
        dbias = column_sum(results[0].flatten(1))
    return (*results, dbias)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_call: AttentionCall,
    packed: bool,
    wants_relative_bias: bool,
    wants_bias: bool,
) -> tuple[Tensor, ...]:
    """As attention_backward, for queries and keys that are rotated already.

    dq is added atomically, or computed by a second kernel under torch.use_deterministic_algorithms or where the launch
    parameters say that this is faster.
    """
    nothing = lambda: q.new_empty(0)
    heads = [x.shape[1] for x in (q, k, v)]
    if packed:
        dqkv = q.new_empty((q.shape[0], sum(heads), q.shape[2]))
        (dq, dk, dv), results = dqkv.split(heads, 1), (dqkv, nothing(), nothing())
    else:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if attention_call.cu_seqlens_k is not None:
            dq.zero_()  # no kernel writes the rows of a sequence without keys
        results = (dq, dk, dv)
    arguments = _arguments(q, k, v, attention_call)
    dout = dout.contiguous()
    widest = attention_short.WIDEST_BACKWARD if dlse is None else 0
    division = _divide(arguments, attention_call, widest)
    arguments["dout_ptr"] = dout
    head_dim, batch = q.shape[2], attention_call.cu_seqlens_q.shape[0] - 1
    if division.any_length:
        arguments["record_ptr"] = new_record(lse)
        named = {"out_ptr": out, "dlse_ptr": _contiguous(dlse), "lse_ptr": lse}
        launch = config_delta(head_dim, _precision(arguments), _biased(arguments))
        of_grid, grid = _blocks(division, attention_call.max_seqlen_q, launch["BLOCK_M"], arguments)
        named |= arguments | of_grid
        taken = {name: named[name] for name in _attention_delta_kernel.arg_names if name in named}
        if 0 not in grid:
            run(_attention_delta_kernel, grid, **taken, **launch)
    dbias = torch.zeros(3 * q[0].numel(), device=q.device) if wants_bias else nothing()
    if division.short:
        gradients = (dq, dk, dv)
        sums = attention_short.backward(
            gradients,
            lse,
            attention_call.bounds,
            attention_call.max_seqlen_q,
            wants_bias,
            arguments,
        )
        if sums is not None:
            dbias += sums.sum(0).flatten()
    if division.any_length:
        sums = _backward_any_length(q, dq, dk, dv, division, attention_call, wants_bias, arguments)
        if sums is not None:
            dbias += sums.sum(0).flatten()
    if not wants_relative_bias:
        return (*results, nothing(), dbias)
    drelative_bias = relative_bias_gradient(
        attention_call.relative_bias,
        attention_call.max_seqlen_q,
        attention_call.max_seqlen_k,
        batch=batch,
        launch=relative_config(head_dim, _precision(arguments)),
        **arguments,
    )
    return (*results, drelative_bias, dbias)


def _backward_any_length(
    q: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    division: _Division,
    attention_call: AttentionCall,
    wants_sums: bool,
    arguments: dict,
) -> Tensor | None:
    """Write dq, dk and dv.

    Returns: their sums over blocks of tokens, float32 (slots, 3, H, D), or None.
    """
    max_seqlen_q, max_seqlen_k = attention_call.max_seqlen_q, attention_call.max_seqlen_k
    batch = arguments["cu_seqlens_q_ptr"].shape[0] - 1
    gradients = {"dq_ptr": dq, "stride_dq": dq.stride(0), "sums_ptr": None}
    launch = dict(_config("backward_kv", max_seqlen_k, arguments))
    atomic = launch.pop("ATOMIC") and not torch.are_deterministic_algorithms_enabled()
    launch_q, wide_dq, finished = None, None, None
    if not atomic:
        launch_q = _config("backward_q", max_seqlen_q, arguments)
    else:
        wide_dq, finished = _zeroed_dq(q, batch * dk.shape[1])
    if wants_sums:
        block = min(launch["BLOCK_N"], launch_q["BLOCK_M"] if launch_q else launch["BLOCK_N"])
        shape = (q.shape[0] // block + batch, 3, *q.shape[1:])
        gradients["sums_ptr"] = torch.zeros(shape, dtype=torch.float32, device=q.device)
    of_grid, grid = _blocks(
        division, max_seqlen_k, launch["BLOCK_N"], arguments, arguments["GROUP"]
    )
    if 0 not in grid:
        run(
            _attention_bwd_kv_kernel,
            grid,
            wide_dq_ptr=wide_dq,
            finished_ptr=finished,
            dk_ptr=dk,
            dv_ptr=dv,
            stride_dkv=dk.stride(0),
            **of_grid,
            **gradients,
            **arguments,
            **launch,
        )
    if launch_q:
        of_grid, grid = _blocks(division, max_seqlen_q, launch_q["BLOCK_M"], arguments)
        if 0 not in grid:
            run(_attention_bwd_q_kernel, grid, **of_grid, **gradients, **arguments, **launch_q)
    return gradients["sums_ptr"]


def _zeroed_dq(q: Tensor, counts: int) -> tuple[Tensor, Tensor]:
    """(zeros for dq in float32, zeros for the counts of programs that have added to it), filled by one kernel."""
    size = q.numel()
    zeros = torch.zeros(size + counts, dtype=torch.float32, device=q.device)
    return zeros[:size], zeros[size:].view(torch.int32)
