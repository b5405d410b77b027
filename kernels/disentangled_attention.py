"""Attention whose scores also compare content with relative positions, forward and backward, by online softmax.

    s[i, j] = scale * (q[i] . k[j] + q[i] . keys[d] + k[j] . queries[d]),  d = j - i
    out = dropout(softmax(s)) v;  lse = log sum_j exp(s[i, j])

The tables have a row for each distance d, at d + origin: a kernel expands them. A tile of BLOCK queries by BLOCK keys
has 2 BLOCK - 1 distances. Its queries' products with the rows of these distances have the term of pair (m, n) in row m,
at n - m + BLOCK; those of its keys likewise. A gather in shared memory brings each term to its pair (_by_pair).

Tiling: as in attention_forward.py, one program is (block of queries, sequence, head), or of keys in the backward. The
backward computes the scores once, with dv in registers. It writes the gradients of the scores, ds, in the inputs' type
to a workspace: by pair, and by distance. By distance, (t, d) is at t * width + d, where t is a token: the rows of
neighbouring queries overlap in memory, because their distances differ by one. So a tile of tokens and distances is a
plain strided tile. All other gradients are products of such tiles:

    dq[i] = sum_j ds[i, j] k[j] + sum_d ds[i, i + d] keys[d];        dk[j] likewise
    dkeys[d] = sum_i ds[i, i + d] q[i];                              dqueries[d] = sum_j ds[j - d, j] k[j]

The workspace holds as many heads as fit into WORKSPACE bytes, at least one; the others follow. For the gradients of the
tables one program is (block of distances, chunk of sequences, head); the chunks' sums are added in order. There are no
atomics.

Bytes: forward 4 T H D elements; the backward writes ds three times and reads it six times. FLOPs: with both terms
12 H D sum(length^2) forward, 26 backward.
Source: He et al. 2020, arXiv:2006.03654; Dao 2023, arXiv:2307.08691.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    is_large,
    load_record_once,
    load_rows,
    natural_lse,
    new_record,
    probabilities,
    scaled,
    score_gradients,
    sequence_bounds,
    shape_constants,
    store_record,
    store_rows,
    unit_of,
)
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread, threshold_and_scale
from fastenc.kernels.index_sum import index_sum
from fastenc.kernels.launch import tunable, warp_groups
from fastenc.kernels.run import run
from torch import Tensor

VARYING = ["total_q", "blocks", "origin", "threshold"]
VARYING_HEADS = [*VARYING, "first_head", "stride_pairs", "stride_distances", "width"]
# Elements. Strides of the workspace are given in this unit, so that the compiler knows that rows are aligned.
UNIT = tl.constexpr(16)
WORKSPACE = 256 * 2**20  # bytes
SUMS = 2048  # blocks of distances, of all heads and chunks
MARGIN = 128  # distances beyond the longest sequence that a block may touch


@triton.jit
def _program(cu_seqlens_ptr, blocks, BLOCK: tl.constexpr):
    """(first token of the block in its sequence, first token and length of the sequence)."""
    start = tl.program_id(0) % blocks * BLOCK
    first, length = sequence_bounds(cu_seqlens_ptr, tl.program_id(0) // blocks)
    return start, first, length


@triton.jit(do_not_specialize=["origin", "reach", "count"])
def _disentangled_expand_kernel(
    position_ptr,  # (rows, width)
    slots_ptr,  # (2 reach + 1,), int32
    out_ptr,  # (count, width)
    stride_row,  # of the table
    origin,
    reach,
    count,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = the table's row for distance r - origin."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    distance = tl.minimum(tl.maximum(row - origin, -reach), reach)
    slot = tl.load(slots_ptr + distance + reach).to(tl.int64)
    mask = (row < count)[:, None] & (column < width)[None, :]
    values = tl.load(
        position_ptr + slot[:, None] * stride_row + column[None, :], mask=mask, other=0.0
    )
    tl.store(out_ptr + row.to(tl.int64)[:, None] * width + column[None, :], values, mask=mask)


@triton.jit
def _distance_rows(
    position_ptr, first, head,
    SIGN: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """(COUNT, BLOCK_D): the rows of an expanded table from ``first`` on, upwards or, with SIGN -1, downwards."""
    row = first + SIGN * tl.arange(0, COUNT)
    return load_rows(position_ptr + head * D, row, H * D, row >= 0, D, BLOCK_D)


@triton.jit
def _by_pair(terms, BLOCK: tl.constexpr, OF_QUERIES: tl.constexpr):
    """Terms by distance → (BLOCK, BLOCK), queries m by keys n: that of n - m + BLOCK.

    terms: OF_QUERIES (BLOCK, 2 BLOCK), queries by distance; else (2 BLOCK, BLOCK), distances by key.
    A gather along the only axis goes through shared memory. In the order that the terms have there, no two lanes of a
    warp meet in a bank: neither when they write, each one of 8 rows and one of 4 pairs of columns of the terms, nor
    when they read such pairs.
    """
    WIDTH: tl.constexpr = 2 * BLOCK
    if OF_QUERIES:
        flat = tl.reshape(terms, [BLOCK // 8, 8, WIDTH // 8, 4, 2])
    else:
        flat = tl.reshape(terms, [WIDTH // 8, 8, BLOCK // 8, 4, 2])
    flat = tl.reshape(tl.permute(flat, [0, 2, 4, 1, 3]), [BLOCK * WIDTH])
    pair = tl.arange(0, BLOCK * BLOCK)
    m, n = pair // BLOCK, pair % BLOCK
    # n - m + BLOCK is 8 eights + near % 8. Written this way, most indices of a thread differ by constants.
    near = n % 8 - m % 8 + 8
    eights = n // 8 - m // 8 + BLOCK // 8 - 1 + near // 8
    if OF_QUERIES:
        group = (m // 8 * (WIDTH // 8) + eights) * 2 + near % 2
        index = group * 32 + m % 8 * 4 + near // 2 % 4
    else:
        group = (eights * (BLOCK // 8) + n // 8) * 2 + n % 2
        index = group * 32 + near % 8 * 4 + n // 2 % 4
    return tl.reshape(tl.gather(flat, index, 0), [BLOCK, BLOCK])


@triton.jit
def _products(
    q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores over scale, queries by keys."""
    nearest = start_n - start_m - BLOCK + origin
    s = None
    if position_keys_ptr is not None:
        rows = _distance_rows(position_keys_ptr, nearest, head, 1, H, D, BLOCK_D, 2 * BLOCK)
        s = _by_pair(tl.dot(q, rows.T, input_precision=PRECISION), BLOCK, True)
    if position_queries_ptr is not None:
        rows = _distance_rows(position_queries_ptr, nearest, head, 1, H, D, BLOCK_D, 2 * BLOCK)
        of_keys = _by_pair(tl.dot(rows, k.T, input_precision=PRECISION), BLOCK, False)
        s = of_keys if s is None else s + of_keys
    return tl.dot(q, k.T, s, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def _disentangled_fwd_kernel(
    q_ptr,  # (total_q, H, D)
    k_ptr,
    v_ptr,
    position_keys_ptr,  # (2 origin, H, D), contiguous, or None
    position_queries_ptr,  # as keys
    out_ptr,  # (total_q, H, D), contiguous
    lse_ptr,  # (H, total_q), float32
    cu_seqlens_ptr,  # (batch+1,), int32
    rng_ptr,  # (2,), int64: seed and offset, or None
    stride_token,  # of q, k and v
    stride_head,
    total_q,
    blocks,  # of the longest sequence
    origin,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start_m, first, length = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_m >= length:
        return
    head = tl.program_id(1)
    offs_m = start_m + tl.arange(0, BLOCK)
    mask_m, tokens = offs_m < length, first + offs_m
    if rng_ptr is not None:
        dropout = row_keys(load_rng(rng_ptr), head, tokens[:, None])
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_n in tl.range(0, length, BLOCK):
        columns = start_n + tl.arange(0, BLOCK)
        k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, columns < length, D, BLOCK_D)
        s = _products(
            q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
            H, D, BLOCK_D, BLOCK, PRECISION,
        )  # fmt: skip
        s = tl.where((columns < length)[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, scaled(tl.max(s, 1), scale * LOG2_E))
        p = tl.math.exp2(s * unit_of(new_max, scale * LOG2_E)[:, None] - new_max[:, None])
        rescale = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if rng_ptr is not None:
            p = tl.where(is_kept(dropout, spread(columns)[None, :], threshold), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    if rng_ptr is not None:
        acc *= drop_scale
    out_base = out_ptr + first.to(tl.int64) * (H * D) + head * D
    store_rows(out_base, offs_m, H * D, mask_m, acc / row_sum[:, None], D, BLOCK_D)
    lse = natural_lse(row_max, row_sum, scale)
    tl.store(lse_ptr + head.to(tl.int64) * total_q + tokens, lse, mask=mask_m)


@triton.jit(do_not_specialize=VARYING)
def _disentangled_record_kernel(
    q_ptr,
    k_ptr,
    position_keys_ptr,
    position_queries_ptr,
    out_ptr,  # (total_q, H, D), contiguous
    dout_ptr,  # as out
    lse_ptr,  # (H, total_q), float32
    record_ptr,  # (H, total_q, RECORD), int32
    cu_seqlens_ptr,
    rng_ptr,
    stride_token,
    stride_head,
    total_q,
    blocks,
    origin,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries' records, with sum_d out dout / drop_scale as their second word.

    Where rounding lse would show in the probabilities, they are divided by their sum, which this kernel forms.
    """
    start_m, first, length = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_m >= length:
        return
    head = tl.program_id(1)
    offs_m = start_m + tl.arange(0, BLOCK)
    mask_m, tokens = offs_m < length, first + offs_m
    indices = head.to(tl.int64) * total_q + tokens
    out = load_rows(out_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    lse = tl.load(lse_ptr + indices, mask=mask_m, other=0.0)
    large = is_large(lse)
    log_sum, base = tl.where(large, 0.0, lse) * LOG2_E, tl.zeros([BLOCK], tl.float32)
    if tl.max(large.to(tl.int32), 0) > 0:
        q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
        k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for start_n in tl.range(0, length, BLOCK):
            columns = start_n + tl.arange(0, BLOCK)
            k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
            s = _products(
                q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
                H, D, BLOCK_D, BLOCK, PRECISION,
            )  # fmt: skip
            s = tl.where((columns < length)[None, :], s, float("-inf"))
            higher = tl.maximum(maxima, tl.max(s, 1))
            sums *= tl.math.exp2((maxima - higher) * (scale * LOG2_E))
            sums += tl.sum(tl.math.exp2((s - higher[:, None]) * (scale * LOG2_E)), 1)
            maxima = higher
        log_sum = tl.where(large, tl.math.log2(tl.where(large, sums, 1.0)), log_sum)
        base = tl.where(large, maxima, base)
    rng = None
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
        delta /= drop_scale
    delta = delta.to(tl.int32, bitcast=True)
    store_record(record_ptr, log_sum, base, delta, rng, head, tokens, indices, mask_m)


@triton.jit
def _store_by_distance(base, first, start_own, start_other, ds, length, width, BLOCK: tl.constexpr):
    """ds: own rows by other rows, from these of the sequence on, whose first token is ``first``."""
    offsets = tl.arange(0, BLOCK)
    base += (first + start_own).to(tl.int64) * width + (start_other - start_own)
    valid = (offsets < length - start_own)[:, None] & (offsets < length - start_other)[None, :]
    tl.store(base + (offsets[:, None] * (width - 1) + offsets[None, :]), ds, mask=valid)


@triton.jit(do_not_specialize=VARYING_HEADS)
def _disentangled_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_keys_ptr,
    position_queries_ptr,
    dout_ptr,
    dv_ptr,  # (total_q, H, D), heads next to each other
    by_pair_ptr,  # (heads, total_q, stride_pairs): ds of query and key
    by_query_ptr,  # (heads, stride_distances): ds of query and distance; None without position_keys
    by_key_ptr,  # ds of key and minus distance; None without position_queries
    record_ptr,
    cu_seqlens_ptr,
    rng_ptr,  # None without dropout; not read
    stride_token,
    stride_head,
    stride_dv,  # of tokens
    stride_pairs,  # of queries, in units of UNIT elements
    stride_distances,  # of heads, in these units
    width,  # stride of tokens by distance, in these units
    total_q,
    blocks,
    origin,
    first_head,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start_n, first, length = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_n >= length:
        return
    own_head = tl.program_id(1).to(tl.int64)
    head = tl.program_id(1) + first_head
    columns = start_n + tl.arange(0, BLOCK)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    stride_pairs, width = stride_pairs * UNIT, width * UNIT
    pairs = own_head * total_q + first
    distances = own_head * stride_distances * UNIT
    k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
    v = load_rows(v_base, columns, stride_token, columns < length, D, BLOCK_D)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_m in tl.range(0, length, BLOCK):
        offs_m = start_m + tl.arange(0, BLOCK)
        mask_m = offs_m < length
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
        log_sum, base, second, one, two = load_record_once(record_ptr, statistics + offs_m, mask_m)
        base = tl.where(mask_m, base, float("inf"))  # no query has no probabilities
        delta = second.to(tl.float32, bitcast=True)
        dropout = (None, threshold)
        if rng_ptr is not None:
            dropout = ((one[:, None], two[:, None]), threshold)
        s = _products(
            q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
            H, D, BLOCK_D, BLOCK, PRECISION,
        )  # fmt: skip
        s = tl.where((columns < length)[None, :], s, float("-inf"))
        p = probabilities(s, base[:, None], log_sum[:, None], scale * LOG2_E)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        kept, ds = score_gradients(p, dp, delta[:, None], columns[None, :], dropout)
        dv = tl.dot(kept.to(dout.dtype).T, dout, dv, input_precision=PRECISION)
        ds = ds.to(q.dtype)
        if by_query_ptr is not None:
            _store_by_distance(
                by_query_ptr + distances, first, start_m, start_n, ds, length, width, BLOCK
            )
        if by_key_ptr is not None:
            _store_by_distance(
                by_key_ptr + distances, first, start_n, start_m, ds.T, length, width, BLOCK
            )
        offsets = tl.arange(0, BLOCK)
        base = by_pair_ptr + (pairs + start_m) * stride_pairs + start_n
        tl.store(
            base + offsets[:, None] * stride_pairs + offsets[None, :], ds, mask=mask_m[:, None]
        )
    if rng_ptr is not None:
        dv *= drop_scale
    dv_base = dv_ptr + first.to(tl.int64) * stride_dv + head * D
    store_rows(dv_base, columns, stride_dv, columns < length, dv, D, BLOCK_D)


@triton.jit
def _load_by_distance(base, own, distance, length, width, MASKED: tl.constexpr):
    """ds of own rows by distance, 0 where there is no such pair; base: of the sequence's first token.

    MASKED: whether some distance may lead out of the sequence.
    """
    pointers = base + own.to(tl.int64)[:, None] * width + distance[None, :]
    ds = tl.load(pointers, mask=(own < length)[:, None], other=0.0)
    if MASKED:
        other = own[:, None] + distance[None, :]
        ds = tl.where((other >= 0) & (other < length), ds, 0.0)
    return ds


@triton.jit
def _add_distances(
    grad, base, position_ptr, start, nearest, stop, length, width, origin, head,
    SIGN: tl.constexpr, MASKED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad + ds times the table's rows for distances from ``nearest`` to ``stop``, of own rows from ``start`` on."""
    own = start + tl.arange(0, BLOCK)
    for first in tl.range(nearest, stop, BLOCK):
        distance = first + tl.arange(0, BLOCK)
        ds = _load_by_distance(base, own, distance, length, width, MASKED)
        rows = _distance_rows(position_ptr, origin + SIGN * first, head, SIGN, H, D, BLOCK_D, BLOCK)
        grad = tl.dot(ds, rows, grad, input_precision=PRECISION)
    return grad


@triton.jit
def _add_rows(
    sums, base, own_base, nearest, start, stop, length, width, stride_token,
    MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + ds times own rows from ``start`` to ``stop``, of distances from ``nearest`` on."""
    distance = nearest + tl.arange(0, BLOCK)
    for first in tl.range(start, stop, BLOCK):
        own = first + tl.arange(0, BLOCK)
        ds = _load_by_distance(base, own, distance, length, width, MASKED)
        x = load_rows(own_base, own, stride_token, own < length, D, BLOCK_D)
        sums = tl.dot(ds.T, x, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=VARYING_HEADS)
def _disentangled_bwd_rows_kernel(
    by_pair_ptr,  # (heads, total_q, stride_pairs): ds of query and key
    other_ptr,  # (total_q, H, D): k for the gradient of q, q for that of k
    by_distance_ptr,  # (heads, stride_distances): ds of own row and distance from the other; or None
    position_ptr,  # (2 origin, H, D): with which own rows are compared
    grad_ptr,  # (total_q, H, D), heads next to each other
    cu_seqlens_ptr,
    stride_token,  # of other
    stride_head,
    stride_grad,  # of tokens
    stride_pairs,
    stride_distances,
    width,
    total_q,
    blocks,
    origin,
    first_head,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGN: tl.constexpr,  # 1 if own rows are queries, -1 if they are keys
    PRECISION: tl.constexpr,
):
    start, first, length = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start >= length:
        return
    own_head = tl.program_id(1).to(tl.int64)
    head = tl.program_id(1) + first_head
    own = start + tl.arange(0, BLOCK)
    stride_pairs, width = stride_pairs * UNIT, width * UNIT
    grad = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    pairs = own_head * total_q + first
    other_base = head_rows(other_ptr, first, stride_token, head, stride_head)
    offsets = tl.arange(0, BLOCK)
    for start_n in tl.range(0, length, BLOCK):
        columns = start_n + offsets
        x = load_rows(other_base, columns, stride_token, columns < length, D, BLOCK_D)
        query, key = (start, start_n) if SIGN == 1 else (start_n, start)
        base = by_pair_ptr + (pairs + query) * stride_pairs + key
        pointers = base + offsets[:, None] * stride_pairs + offsets[None, :]
        ds = tl.load(pointers, mask=(offsets < length - query)[:, None], other=0.0)
        if SIGN == -1:
            ds = ds.T
        grad = tl.dot(ds, x, grad, input_precision=PRECISION)
    if by_distance_ptr is not None:
        base = by_distance_ptr + own_head * stride_distances * UNIT + first.to(tl.int64) * width
        # Distances of the blocks that lead out of the sequence for no row of the block.
        inner = -start
        outer = tl.maximum(inner, inner + (length + 1) // BLOCK * BLOCK - BLOCK)
        for part in tl.static_range(3):
            if part == 0:
                nearest, stop = inner - BLOCK, inner
            elif part == 1:
                nearest, stop = inner, outer
            else:
                nearest, stop = outer, length - start
            grad = _add_distances(
                grad, base, position_ptr, start, nearest, stop, length, width, origin, head,
                SIGN, part != 1, H, D, BLOCK_D, BLOCK, PRECISION,
            )  # fmt: skip
    grad_base = grad_ptr + first.to(tl.int64) * stride_grad + head * D
    store_rows(grad_base, own, stride_grad, own < length, grad * scale, D, BLOCK_D)


@triton.jit(do_not_specialize=[*VARYING_HEADS, "batch"])
def _disentangled_bwd_tables_kernel(
    by_distance_ptr,  # (heads, stride_distances): ds of own rows and their distance from others
    own_ptr,  # (total_q, H, D)
    partial_ptr,  # (chunks, 2 blocks BLOCK, H, D), float32
    cu_seqlens_ptr,
    stride_token,  # of own
    stride_head,
    stride_distances,
    width,
    blocks,
    batch,
    first_head,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[..., r, :, :]: sums of ds times own rows for distance r - blocks * BLOCK."""
    chunk = tl.program_id(1)
    own_head = tl.program_id(2).to(tl.int64)
    head = tl.program_id(2) + first_head
    nearest = (tl.program_id(0) - blocks) * BLOCK
    width *= UNIT
    sums = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for sequence in tl.range(chunk, batch, tl.num_programs(1)):
        first, length = sequence_bounds(cu_seqlens_ptr, sequence)
        base = by_distance_ptr + own_head * stride_distances * UNIT + first.to(tl.int64) * width
        own_base = head_rows(own_ptr, first, stride_token, head, stride_head)
        # Own rows of the blocks that lead out of the sequence by no distance of the block.
        inner = tl.maximum(0, -nearest)
        last = tl.minimum(length, length - nearest)
        outer = tl.maximum(inner, inner + (last + 1 - inner) // BLOCK * BLOCK - BLOCK)
        for part in tl.static_range(3):
            if part == 0:
                start, stop = tl.maximum(0, -nearest - BLOCK), inner
            elif part == 1:
                start, stop = inner, outer
            else:
                start, stop = outer, last
            sums = _add_rows(
                sums, base, own_base, nearest, start, stop, length, width, stride_token,
                part != 1, D, BLOCK_D, BLOCK, PRECISION,
            )  # fmt: skip
    rows = tl.arange(0, BLOCK)
    first_row = chunk * tl.num_programs(0) + tl.program_id(0)
    partial = partial_ptr + first_row.to(tl.int64) * (BLOCK * H * D) + head * D
    store_rows(partial, rows, H * D, rows >= 0, sums * scale, D, BLOCK_D)


@tunable(
    "disentangled_attention",
    bucketed=("max_seqlen",),
    BLOCK=(32, 64, 128),
    num_warps=(4, 8),
    num_stages=(1, 2, 3),
)
def config(kernel: str, head_dim: int, precision: str, warp_groups: bool) -> dict:
    """Launch parameters of a kernel of ``_KERNELS`` where no table has better ones; only the forward's were tuned.

    precision: "half" for 2-byte types, else the precision of float32 products.
    """
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles spill.
        return _launch(16, 1)
    # Smaller matrix instructions hold their operands in registers, too many of them for larger tiles.
    block = 64 if precision == "half" and warp_groups else 32
    # The other kernels would need the shared memory of a second program to load in advance.
    in_advance = precision == "half" and kernel in ("backward_rows", "backward_tables")
    return _launch(block, 3 if in_advance else 1)


def config_expand(width: int) -> dict:
    """Launch parameters of the tables' expansion; not tuned on a device yet."""
    return {"ROWS": 4, "BLOCK": min(1024, triton.next_power_of_2(width)), "num_warps": 4}


def _launch(block: int, num_stages: int) -> dict:
    return {"BLOCK": block, "num_warps": 4, "num_stages": num_stages}


_KERNELS: dict[str, Any] = {
    "forward": _disentangled_fwd_kernel,
    "record": _disentangled_record_kernel,
    "backward": _disentangled_bwd_kernel,
    "backward_rows": _disentangled_bwd_rows_kernel,
    "backward_tables": _disentangled_bwd_tables_kernel,
}


def binaries() -> Iterator[tuple[str, Any, dict]]:
    """(name, kernel, constants) of what a test compiles ahead of time, for every element type."""
    yield "table by distance", _disentangled_expand_kernel, config_expand(768)


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, kernel in product((32, 64), ("half", "tf32", "ieee"), _KERNELS):
        dtype = "float16" if precision == "half" else "float32"
        key = {"kernel": kernel, "head_dim": dim, "precision": precision}
        yield {**key, "dropout": True, "dtype": dtype}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel, constants = _KERNELS[key["kernel"]], shape_constants(key)
    constants = {name: constants[name] for name in constants if name in kernel.arg_names}
    if key["kernel"] != "backward_rows":
        yield "", kernel, constants
        return
    for sign, variant in ((1, " of queries"), (-1, " of keys")):
        yield variant, kernel, {**constants, "SIGN": sign}


def _expanded(table: Tensor | None, slots: Tensor, origin: int) -> Tensor | None:
    """(2 origin, H, D): the table's rows for the distances from -origin on."""
    if table is None:
        return None
    if table[0].stride() != (table.shape[2], 1):
        table = table.contiguous()
    out = table.new_empty((2 * origin, *table.shape[1:]))
    count, width = out.shape[0], out[0].numel()
    launch = config_expand(width)
    grid = (triton.cdiv(count, launch["ROWS"]), triton.cdiv(width, launch["BLOCK"]))
    sizes = (table.stride(0), origin, slots.shape[0] // 2, count, width)
    run(_disentangled_expand_kernel, grid, table, slots.contiguous(), out, *sizes, **launch)
    return out


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    slots: Tensor,
    cu_seqlens: Tensor,
    rng_state: Tensor | None,
    max_seqlen: int,
    dropout_p: float,
    scale: float,
) -> dict:
    """The arguments and constants that the kernels share."""
    if q.stride(2) != 1 or not q.stride() == k.stride() == v.stride():
        q, k, v = (x.contiguous() for x in (q, k, v))
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    longest = max(1, max_seqlen)
    origin = longest + MARGIN
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    heads, head_dim = q.shape[1:]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "position_keys_ptr": _expanded(position_keys, slots, origin),
        "position_queries_ptr": _expanded(position_queries, slots, origin),
        "cu_seqlens_ptr": cu_seqlens.contiguous(),
        "rng_ptr": rng_state if threshold else None,
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "total_q": q.shape[0],
        "longest": longest,
        "origin": origin,
        "scale": scale,
        "threshold": threshold,
        "drop_scale": drop_scale,
        "H": heads,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _prepare(name: str, shared: dict, **own: Any) -> dict:
    """All arguments of a kernel, and its launch parameters. own: those that other kernels do not have."""
    launch = config(
        name,
        shared["D"],
        shared["PRECISION"] if shared["q_ptr"].dtype == torch.float32 else "half",
        warp_groups(shared["q_ptr"].device),
        like=shared["q_ptr"],
        max_seqlen=shared["longest"],
        dropout=shared["threshold"] > 0,
    )
    blocks = triton.cdiv(shared["longest"], launch["BLOCK"])
    taken = {**shared, **own, "blocks": blocks}
    return {key: taken[key] for key in _KERNELS[name].arg_names if key in taken} | launch


def _run_in_blocks(name: str, shared: dict, heads: int, **own: Any) -> None:
    """Run a kernel that has a program for each block of a sequence and head."""
    arguments = _prepare(name, shared, **own)
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    run(_KERNELS[name], (arguments["blocks"] * batch, heads), **arguments)


def disentangled_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments
) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). arguments: those of the op's schema after v."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if q.shape[0]:
        shared = _arguments(q, k, v, *arguments)
        _run_in_blocks("forward", shared, q.shape[1], out_ptr=out, lse_ptr=lse)
    return out, lse


def disentangled_attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dqkv, dposition_keys, dposition_queries, dbias). rest: the arguments of the op's schema after v."""
    *arguments, wants_bias = rest
    tables, slots = arguments[:2], arguments[2]
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    dtables = [q.new_empty(0) if table is None else torch.zeros_like(table) for table in tables]
    if q.shape[0]:
        shared = _arguments(q, k, v, *arguments)
        shared |= {"dout_ptr": dout.contiguous(), "record_ptr": new_record(lse)}
        _run_in_blocks("record", shared, q.shape[1], out_ptr=out, lse_ptr=lse)
        sums = _head_gradients(shared, dqkv)
        for number, table in enumerate(tables):
            if table is not None:
                dtables[number] = _of_slots(sums[number], table, slots, descending=number == 1)
    dbias = column_sum(dqkv.flatten(1)) if wants_bias else q.new_empty(0, dtype=torch.float32)
    return dqkv, *dtables, dbias


def _head_gradients(shared: dict, dqkv: Tensor) -> list[Tensor | None]:
    """Fills dqkv. Returns for each table the sums (chunks, distances, H, D) by ``backward_tables``, or None."""
    q, longest = shared["q_ptr"], shared["longest"]
    tokens, heads = q.shape[:2]
    has_keys, has_queries = (
        shared[f"position_{name}_ptr"] is not None for name in ("keys", "queries")
    )
    dq, dk, dv = dqkv.unbind(1)
    # A row by distance ends before that of the next query begins. A block may read past the first and the last one.
    unit = UNIT.value
    width, before = triton.cdiv(longest + 1, unit), triton.cdiv(longest + 2 * MARGIN, unit)
    stride_distances = tokens * width + 2 * before
    stride_pairs = triton.cdiv(longest, MARGIN) * (MARGIN // unit)
    shared |= {"width": width, "stride_distances": stride_distances, "stride_pairs": stride_pairs}
    elements = (tokens * stride_pairs + (has_keys + has_queries) * stride_distances) * unit
    passes = triton.cdiv(heads, max(1, WORKSPACE // (elements * q.element_size())))
    step = triton.cdiv(heads, passes)
    by_pair = q.new_empty((step, tokens, stride_pairs * unit))
    by_query, by_key = (
        q.new_empty((step, stride_distances * unit))[:, before * unit :] if has else None
        for has in (has_keys, has_queries)
    )
    scale = shared["scale"] * shared["drop_scale"]
    k, keys, queries = shared["k_ptr"], shared["position_keys_ptr"], shared["position_queries_ptr"]
    sums: list[dict | None] = [
        _sums_arguments(shared, by_query, q, scale),
        _sums_arguments(shared, by_key, k, scale),
    ]
    for first_head in range(0, heads, step):
        count = min(step, heads - first_head)
        shared["first_head"] = first_head
        _run_in_blocks(
            "backward", shared, count, dv_ptr=dv, stride_dv=dv.stride(0), by_pair_ptr=by_pair,
            by_query_ptr=by_query, by_key_ptr=by_key,
        )  # fmt: skip
        for grad, other, by_distance, table, sign in (
            (dq, k, by_query, keys, 1),
            (dk, q, by_key, queries, -1),
        ):
            _run_in_blocks(
                "backward_rows", {**shared, "scale": scale}, count, grad_ptr=grad,
                stride_grad=grad.stride(0), by_pair_ptr=by_pair, other_ptr=other,
                by_distance_ptr=by_distance, position_ptr=table, SIGN=sign,
            )  # fmt: skip
        for arguments in sums:
            if arguments is not None:
                chunks, rows_count = arguments["partial_ptr"].shape[:2]
                grid = (rows_count // arguments["BLOCK"], chunks, count)
                run(
                    _disentangled_bwd_tables_kernel, grid, **{**arguments, "first_head": first_head}
                )
    return [arguments and arguments["partial_ptr"] for arguments in sums]


def _sums_arguments(
    shared: dict, by_distance: Tensor | None, own: Tensor, scale: float
) -> dict | None:
    """The arguments of ``backward_tables`` but the first head, or None without such a table."""
    if by_distance is None:
        return None
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    arguments = _prepare(
        "backward_tables", {**shared, "scale": scale}, by_distance_ptr=by_distance, own_ptr=own,
        partial_ptr=None, batch=batch, first_head=0,
    )  # fmt: skip
    distances = 2 * arguments["blocks"] * arguments["BLOCK"]
    heads, head_dim = own.shape[1:]
    chunks = min(batch, max(1, SUMS // (2 * arguments["blocks"] * heads)))
    arguments["partial_ptr"] = own.new_empty(
        (chunks, distances, heads, head_dim), dtype=torch.float32
    )
    return arguments


def _of_slots(partial: Tensor, table: Tensor, slots: Tensor, descending: bool) -> Tensor:
    """The table's gradient, its shape and dtype: sums over the distances that share a row."""
    count, reach = partial.shape[1], slots.shape[0] // 2
    distance = torch.arange(-count // 2, count // 2, device=slots.device)
    if descending:
        distance = -distance
    index = slots[distance.clamp(-reach, reach) + reach].long()
    sums = index_sum(partial.sum(0).flatten(1), index, table.shape[0], 0, -1)
    return sums.view(table.shape).to(table.dtype)
