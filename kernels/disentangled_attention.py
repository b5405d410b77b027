"""Attention whose scores also compare content with relative positions, forward and backward, by online softmax.

    s[i, j] = scale * (q[i] . k[j] + q[i] . keys[d] + k[j] . queries[d]),  d = j - i
    out = dropout(softmax(s)) v;  lse = log sum_j exp(s[i, j])

The tables have a row for each distance d, at d + longest - 1: the host expands them. A tile of BLOCK queries by BLOCK
keys has 2 BLOCK - 1 distances. The product of its queries with the rows of these distances has in row m the term of key
n at column n - m + BLOCK - 1. A gather along the row brings it there; keys likewise. The gradients of the terms go the
same way back.

Tiling: as in attention.py, one program is (block of queries, sequence, head), or of keys for dk and dv. Two kernels
compute dq, and dk and dv: nothing is added atomically. For the gradients of the tables one program is (band, chunk of
sequences, head), where a band is one diagonal of tiles. All of its tiles have the same distances, so it adds up their
rows in registers. The buffer of these sums has at most about SUMS rows of 2 BLOCK distances.

Bytes: forward 4 T H D elements. FLOPs: with both terms 12 H D sum(length^2) forward; the backward computes the scores
four times, 70 H D sum(length^2).
Source: He et al. 2020, arXiv:2006.03654; Dao 2023, arXiv:2307.08691.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    is_large,
    load_record_once,
    load_rows,
    new_record,
    probabilities,
    score_gradients,
    sequence_bounds,
    shape_constants,
    store_record,
    store_rows,
)
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread, threshold_and_scale
from fastenc.kernels.index_sum import index_sum
from fastenc.kernels.launch import tunable
from fastenc.kernels.run import run
from torch import Tensor

VARYING = ["total_q", "blocks", "longest", "threshold"]
SUMS = 1024


@triton.jit
def _program(cu_seqlens_ptr, blocks, BLOCK: tl.constexpr):
    """(first token of the block in its sequence, first token and length of the sequence, head)."""
    start = tl.program_id(0) % blocks * BLOCK
    first, length = sequence_bounds(cu_seqlens_ptr, tl.program_id(0) // blocks)
    return start, first, length, tl.program_id(1)


@triton.jit
def _table_rows(
    table_ptr, start_m, start_n, longest, head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(2 BLOCK, BLOCK_D): the rows for a tile's distances, from that of its last query to its first key on."""
    row = start_n - start_m - BLOCK + longest + tl.arange(0, 2 * BLOCK)
    valid = (row >= 0) & (row < 2 * longest - 1)
    return load_rows(table_ptr + head * D, row, H * D, valid, D, BLOCK_D)


@triton.jit
def _to_others(terms, BLOCK: tl.constexpr, BY_KEY: tl.constexpr):
    """(BLOCK, 2 BLOCK) terms by distance → (BLOCK, BLOCK): of queries by key, or BY_KEY of keys by query."""
    offsets = tl.arange(0, BLOCK)
    difference = offsets[None, :] - offsets[:, None]
    column = (BLOCK - 1 - difference) if BY_KEY else (BLOCK - 1 + difference)
    return tl.gather(terms, column, 1)


@triton.jit
def _to_distances(ds, BLOCK: tl.constexpr, BY_KEY: tl.constexpr):
    """The transpose of _to_others: (BLOCK, BLOCK) → (BLOCK, 2 BLOCK), 0 where a tile has no such pair."""
    distance = tl.arange(0, 2 * BLOCK)[None, :] - (BLOCK - 1)
    own = tl.arange(0, BLOCK)[:, None]
    other = (own - distance) if BY_KEY else (own + distance)
    inside = (other >= 0) & (other < BLOCK)
    return tl.where(inside, tl.gather(ds, tl.where(inside, other, 0), 1), 0.0)


@triton.jit
def _scores(
    q, k, start_m, start_n, length, tables, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of queries by keys, -inf past the last key. tables: (keys or None, queries or None, longest, head)."""
    position_keys_ptr, position_queries_ptr, longest, head = tables
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if position_keys_ptr is not None:
        rows = _table_rows(position_keys_ptr, start_m, start_n, longest, head, H, D, BLOCK_D, BLOCK)
        s += _to_others(tl.dot(q, rows.T, input_precision=PRECISION), BLOCK, False)
    if position_queries_ptr is not None:
        rows = _table_rows(
            position_queries_ptr, start_m, start_n, longest, head, H, D, BLOCK_D, BLOCK
        )
        s += _to_others(tl.dot(k, rows.T, input_precision=PRECISION), BLOCK, True).T
    return tl.where((start_n + tl.arange(0, BLOCK) < length)[None, :], s * scale, float("-inf"))


@triton.jit(do_not_specialize=VARYING)
def _disentangled_fwd_kernel(
    q_ptr,  # (total_q, H, D)
    k_ptr,
    v_ptr,
    position_keys_ptr,  # (2 longest - 1, H, D), contiguous, or None
    position_queries_ptr,  # as keys
    out_ptr,  # (total_q, H, D), contiguous
    lse_ptr,  # (H, total_q), float32
    cu_seqlens_ptr,  # (batch+1,), int32
    rng_ptr,  # (2,), int64: seed and offset, or None
    stride_token,  # of q, k and v
    stride_head,
    total_q,
    blocks,  # of the longest sequence
    longest,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start_m, first, length, head = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_m >= length:
        return
    tables = (position_keys_ptr, position_queries_ptr, longest, head)
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
        s = _scores(q, k, start_m, start_n, length, tables, scale, H, D, BLOCK_D, BLOCK, PRECISION)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.math.exp2((s - new_max[:, None]) * LOG2_E)
        rescale = tl.math.exp2((row_max - new_max) * LOG2_E)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if rng_ptr is not None:
            p = tl.where(is_kept(dropout, spread(columns)[None, :], threshold), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    if rng_ptr is not None:
        acc *= drop_scale
    out_base = out_ptr + first.to(tl.int64) * (H * D) + head * D
    store_rows(out_base, offs_m, H * D, mask_m, acc / row_sum[:, None], D, BLOCK_D)
    lse = row_max + tl.math.log2(row_sum) / LOG2_E
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
    longest,
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
    start_m, first, length, head = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_m >= length:
        return
    offs_m = start_m + tl.arange(0, BLOCK)
    mask_m, tokens = offs_m < length, first + offs_m
    indices = head.to(tl.int64) * total_q + tokens
    out = load_rows(out_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    base = tl.load(lse_ptr + indices, mask=mask_m, other=0.0)
    sums = tl.full([BLOCK], 1.0, tl.float32)
    large = is_large(base)
    if tl.max(large.to(tl.int32), 0) > 0:
        tables = (position_keys_ptr, position_queries_ptr, longest, head)
        q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
        k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start_n in tl.range(0, length, BLOCK):
            columns = start_n + tl.arange(0, BLOCK)
            k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
            s = _scores(
                q, k, start_m, start_n, length, tables, scale, H, D, BLOCK_D, BLOCK, PRECISION
            )
            higher = tl.maximum(maxima, tl.max(s, 1))
            total *= tl.math.exp2((maxima - higher) * LOG2_E)
            total += tl.sum(tl.math.exp2((s - higher[:, None]) * LOG2_E), 1)
            maxima = higher
        base = tl.where(large, maxima, base)
        sums = tl.where(large, total, sums)
    rng = None
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
        delta /= drop_scale
    delta = delta.to(tl.int32, bitcast=True)
    store_record(
        record_ptr, tl.math.log2(sums), base, delta, rng, head, tokens, indices, mask_m
    )  # fmt: skip


@triton.jit
def _tile_gradients(
    q, k, v, dout, start_m, start_n, length, statistics, record_ptr, threshold, tables, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(probabilities after dropout, gradients of the scores), queries by keys, both divided by drop_scale."""
    offs_m = start_m + tl.arange(0, BLOCK)
    mask_m = offs_m < length
    log_sum, base, second, one, two = load_record_once(record_ptr, statistics + offs_m, mask_m)
    base = tl.where(mask_m, base, float("inf"))  # no query has no probabilities
    delta = second.to(tl.float32, bitcast=True)
    dropout = (None, threshold)
    if DROPOUT:
        dropout = ((one[:, None], two[:, None]), threshold)
    s = _scores(q, k, start_m, start_n, length, tables, scale, H, D, BLOCK_D, BLOCK, PRECISION)
    p = probabilities(s, base[:, None], log_sum[:, None], LOG2_E)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    columns = start_n + tl.arange(0, BLOCK)
    return score_gradients(p, dp, delta[:, None], columns[None, :], dropout)


@triton.jit(do_not_specialize=VARYING)
def _disentangled_bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_keys_ptr,
    position_queries_ptr,
    dout_ptr,
    dk_ptr,  # (total_q, H, D), heads next to each other
    dv_ptr,
    record_ptr,
    cu_seqlens_ptr,
    rng_ptr,  # None without dropout; not read
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dk and dv
    total_q,
    blocks,
    longest,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start_n, first, length, head = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_n >= length:
        return
    tables = (position_keys_ptr, position_queries_ptr, longest, head)
    columns = start_n + tl.arange(0, BLOCK)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
    v = load_rows(v_base, columns, stride_token, columns < length, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_m in tl.range(0, length, BLOCK):
        offs_m = start_m + tl.arange(0, BLOCK)
        q = load_rows(q_base, offs_m, stride_token, offs_m < length, D, BLOCK_D)
        dout = load_rows(dout_base, offs_m, H * D, offs_m < length, D, BLOCK_D)
        kept, ds = _tile_gradients(
            q, k, v, dout, start_m, start_n, length, statistics, record_ptr, threshold, tables, scale,
            H, D, BLOCK_D, BLOCK, rng_ptr is not None, PRECISION,
        )  # fmt: skip
        dv = tl.dot(kept.to(dout.dtype).T, dout, dv, input_precision=PRECISION)
        by_key = ds.T.to(q.dtype)
        dk = tl.dot(by_key, q, dk, input_precision=PRECISION)
        if position_queries_ptr is not None:
            rows = _table_rows(
                position_queries_ptr, start_m, start_n, longest, head, H, D, BLOCK_D, BLOCK
            )
            by_distance = _to_distances(by_key, BLOCK, True).to(q.dtype)
            dk = tl.dot(by_distance, rows, dk, input_precision=PRECISION)
    if rng_ptr is not None:
        scale *= drop_scale
        dv *= drop_scale
    start = first.to(tl.int64) * stride_grad + head * D
    store_rows(dk_ptr + start, columns, stride_grad, columns < length, dk * scale, D, BLOCK_D)
    store_rows(dv_ptr + start, columns, stride_grad, columns < length, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=VARYING)
def _disentangled_bwd_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_keys_ptr,
    position_queries_ptr,
    dout_ptr,
    dq_ptr,  # (total_q, H, D), heads next to each other
    record_ptr,
    cu_seqlens_ptr,
    rng_ptr,  # None without dropout; not read
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dq
    total_q,
    blocks,
    longest,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start_m, first, length, head = _program(cu_seqlens_ptr, blocks, BLOCK)
    if start_m >= length:
        return
    tables = (position_keys_ptr, position_queries_ptr, longest, head)
    offs_m = start_m + tl.arange(0, BLOCK)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    q = load_rows(q_base, offs_m, stride_token, offs_m < length, D, BLOCK_D)
    dout = load_rows(dout_base, offs_m, H * D, offs_m < length, D, BLOCK_D)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for start_n in tl.range(0, length, BLOCK):
        columns = start_n + tl.arange(0, BLOCK)
        k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, columns < length, D, BLOCK_D)
        _, ds = _tile_gradients(
            q, k, v, dout, start_m, start_n, length, statistics, record_ptr, threshold, tables, scale,
            H, D, BLOCK_D, BLOCK, rng_ptr is not None, PRECISION,
        )  # fmt: skip
        ds = ds.to(q.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if position_keys_ptr is not None:
            rows = _table_rows(
                position_keys_ptr, start_m, start_n, longest, head, H, D, BLOCK_D, BLOCK
            )
            by_distance = _to_distances(ds, BLOCK, False).to(q.dtype)
            dq = tl.dot(by_distance, rows, dq, input_precision=PRECISION)
    if rng_ptr is not None:
        scale *= drop_scale
    start = first.to(tl.int64) * stride_grad + head * D
    store_rows(dq_ptr + start, offs_m, stride_grad, offs_m < length, dq * scale, D, BLOCK_D)


@triton.jit(do_not_specialize=[*VARYING, "batch"])
def _disentangled_bwd_tables_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_keys_ptr,
    position_queries_ptr,
    dout_ptr,
    partial_ptr,  # (chunks, bands, 2 BLOCK, H, D), float32
    record_ptr,
    cu_seqlens_ptr,
    rng_ptr,  # None without dropout; not read
    stride_token,
    stride_head,
    total_q,
    blocks,
    longest,
    batch,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[..., c, :, :]: sums for distance (band - blocks) * BLOCK + 1 + c, of the table of keys or of queries."""
    chunk, head = tl.program_id(1), tl.program_id(2)
    band = (tl.program_id(0) - (blocks - 1)) * BLOCK  # start_n - start_m
    tables = (position_keys_ptr, position_queries_ptr, longest, head)
    sums = tl.zeros([2 * BLOCK, BLOCK_D], tl.float32)
    for sequence in tl.range(chunk, batch, tl.num_programs(1)):
        first, length = sequence_bounds(cu_seqlens_ptr, sequence)
        k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
        v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
        q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
        dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
        statistics = head.to(tl.int64) * total_q + first
        for start_m in tl.range(tl.maximum(0, -band), tl.minimum(length, length - band), BLOCK):
            offs_m = start_m + tl.arange(0, BLOCK)
            columns = offs_m + band
            q = load_rows(q_base, offs_m, stride_token, offs_m < length, D, BLOCK_D)
            dout = load_rows(dout_base, offs_m, H * D, offs_m < length, D, BLOCK_D)
            k = load_rows(k_base, columns, stride_token, columns < length, D, BLOCK_D)
            v = load_rows(v_base, columns, stride_token, columns < length, D, BLOCK_D)
            _, ds = _tile_gradients(
                q, k, v, dout, start_m, start_m + band, length, statistics, record_ptr, threshold, tables, scale,
                H, D, BLOCK_D, BLOCK, rng_ptr is not None, PRECISION,
            )  # fmt: skip
            ds = ds.to(q.dtype)
            if OF_KEYS:
                by_distance = _to_distances(ds, BLOCK, False).to(q.dtype)
                sums = tl.dot(by_distance.T, q, sums, input_precision=PRECISION)
            else:
                by_distance = _to_distances(ds.T, BLOCK, True).to(q.dtype)
                sums = tl.dot(by_distance.T, k, sums, input_precision=PRECISION)
    if rng_ptr is not None:
        scale *= drop_scale
    rows = tl.arange(0, 2 * BLOCK)
    start = (chunk * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (2 * BLOCK * H * D)
    base = partial_ptr + start + head * D
    store_rows(base, rows, H * D, rows >= 0, sums * scale, D, BLOCK_D)


@tunable(
    "disentangled_attention",
    bucketed=("max_seqlen",),
    BLOCK=(16, 32, 64),
    num_warps=(4, 8),
    num_stages=(1, 2, 3),
)
def config(kernel: str, head_dim: int, precision: str) -> dict:
    """Launch parameters of a kernel of ``_KERNELS`` where no table has better ones.

    precision: "half" for 2-byte types, else the precision of float32 products.
    """
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles and loads in advance spill.
        return _launch(16, 8, num_stages=1)
    if kernel == "backward_tables":
        return _launch(16, 4, num_stages=2 if precision == "half" else 1)
    if precision == "tf32":
        return _launch(16, 4)
    return _launch(32, 4 if kernel == "forward" else 8)


def _launch(block: int, num_warps: int, num_stages: int = 2) -> dict:
    return {"BLOCK": block, "num_warps": num_warps, "num_stages": num_stages}


_KERNELS: dict[str, Any] = {
    "forward": _disentangled_fwd_kernel,
    "record": _disentangled_record_kernel,
    "backward_kv": _disentangled_bwd_kv_kernel,
    "backward_q": _disentangled_bwd_q_kernel,
    "backward_tables": _disentangled_bwd_tables_kernel,
}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, kernel in product((32, 64), ("half", "tf32", "ieee"), _KERNELS):
        dtype = "float16" if precision == "half" else "float32"
        key = {"kernel": kernel, "head_dim": dim, "precision": precision}
        yield {**key, "dropout": True, "dtype": dtype}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel, constants = _KERNELS[key["kernel"]], shape_constants(key)
    if key["kernel"] != "backward_tables":
        yield "", kernel, constants
        return
    for of_keys, variant in ((True, " of keys"), (False, " of queries")):
        yield variant, kernel, {**constants, "OF_KEYS": of_keys}


def _rows_of_distances(slots: Tensor, first: int, count: int) -> Tensor:
    """int64 (count,): the table's rows for the distances from ``first`` on."""
    reach = slots.shape[0] // 2
    distance = torch.arange(first, first + count, device=slots.device)
    return slots[distance.clamp(-reach, reach) + reach].long()


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
    """The arguments and constants that all kernels share."""
    if q.stride(2) != 1 or not q.stride() == k.stride() == v.stride():
        q, k, v = (x.contiguous() for x in (q, k, v))
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    longest = max(1, max_seqlen)
    rows = _rows_of_distances(slots, 1 - longest, 2 * longest - 1)
    # An index keeps the order of the table's dimensions in memory.
    keys, queries = (
        None if table is None else table[rows].contiguous()
        for table in (position_keys, position_queries)
    )
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    heads, head_dim = q.shape[1:]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "position_keys_ptr": keys,
        "position_queries_ptr": queries,
        "cu_seqlens_ptr": cu_seqlens.contiguous(),
        "rng_ptr": rng_state if threshold else None,
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "total_q": q.shape[0],
        "longest": longest,
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
        like=shared["q_ptr"],
        max_seqlen=shared["longest"],
        dropout=shared["threshold"] > 0,
    )
    blocks = triton.cdiv(shared["longest"], launch["BLOCK"])
    taken = {**shared, **own, "blocks": blocks}
    return {key: taken[key] for key in _KERNELS[name].arg_names if key in taken} | launch


def _run_in_blocks(name: str, shared: dict, **own: Any) -> None:
    """Run a kernel that has a program for each block of a sequence and head."""
    arguments = _prepare(name, shared, **own)
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    if batch:
        run(_KERNELS[name], (arguments["blocks"] * batch, shared["H"]), **arguments)


def disentangled_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments
) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). arguments: those of the op's schema after v."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _run_in_blocks("forward", _arguments(q, k, v, *arguments), out_ptr=out, lse_ptr=lse)
    return out, lse


def disentangled_attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dqkv, dposition_keys, dposition_queries, dbias). rest: the arguments of the op's schema after v."""
    *arguments, wants_bias = rest
    position_keys, position_queries, slots = arguments[:3]
    shared = _arguments(q, k, v, *arguments)
    shared |= {"dout_ptr": dout.contiguous(), "record_ptr": new_record(lse)}
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    dq, dk, dv = dqkv.unbind(1)
    shared["stride_grad"] = dq.stride(0)
    _run_in_blocks("record", shared, out_ptr=out, lse_ptr=lse)
    _run_in_blocks("backward_kv", shared, dk_ptr=dk, dv_ptr=dv)
    _run_in_blocks("backward_q", shared, dq_ptr=dq)
    dtables = (
        q.new_empty(0) if table is None else _table_gradient(table, slots, of_keys, shared)
        for table, of_keys in ((position_keys, True), (position_queries, False))
    )
    dbias = column_sum(dqkv.flatten(1)) if wants_bias else q.new_empty(0, dtype=torch.float32)
    return dqkv, *dtables, dbias


def _table_gradient(table: Tensor, slots: Tensor, of_keys: bool, shared: dict) -> Tensor:
    """(rows, H, D), dtype of the table."""
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    if not batch:
        return torch.zeros_like(table)
    # partial_ptr comes after its shape is known.
    arguments = _prepare("backward_tables", shared, partial_ptr=None, batch=batch, OF_KEYS=of_keys)
    rows, heads, head_dim = table.shape
    block, blocks = arguments["BLOCK"], arguments["blocks"]
    bands = 2 * blocks - 1
    chunks = min(batch, max(1, SUMS // (bands * heads)))
    shape = (chunks, bands, 2, block, heads * head_dim)
    arguments["partial_ptr"] = torch.empty(shape, dtype=torch.float32, device=table.device)
    run(_disentangled_bwd_tables_kernel, (bands, chunks, heads), **arguments)
    # A band's second half has the distances of the next band's first half.
    first, second = arguments["partial_ptr"].sum(0).unbind(1)
    sums = F.pad(first.flatten(0, 1), (0, 0, 0, block))
    sums += F.pad(second.flatten(0, 1), (0, 0, block, 0))
    index = _rows_of_distances(slots, 1 - blocks * block, sums.shape[0])
    return index_sum(sums, index, rows, 0, -1).view(table.shape).to(table.dtype)
