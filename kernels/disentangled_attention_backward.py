"""The kernels of disentangled attention's backward that form the scores: the queries' records, dv and ds.

Tiling: one program is (block of queries, sequence, head) for the records, and (block of keys, sequence, head) for the
others. It keeps dv in registers and writes the gradients of the scores, ds, in the inputs' type to the workspace: by
pair, and by distance (disentangled_attention_workspace.py).
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
from fastenc.kernels.disentangled_attention_tile import VARYING, products, program
from fastenc.kernels.disentangled_attention_workspace import (
    UNIT,
    VARYING_HEADS,
    store_by_distance,
)
from fastenc.kernels.dropout import load_rng


@triton.jit(do_not_specialize=VARYING)
def disentangled_record_kernel(
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
    start_m, first, length = program(cu_seqlens_ptr, blocks, BLOCK)
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
            s = products(
                q, k, start_m, start_n, position_keys_ptr, position_queries_ptr, origin, head,
                H, D, BLOCK_D, BLOCK, PRECISION,
            )  # fmt: skip
            s = tl.where((columns < length)[None, :], s, float("-inf"))
            maxima, sums = with_columns(maxima, sums, s, scale * LOG2_E)
        log_sum = tl.where(large, tl.math.log2(tl.where(large, sums, 1.0)), log_sum)
        base = tl.where(large, maxima, base)
    rng = None
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
        delta /= drop_scale
    delta = delta.to(tl.int32, bitcast=True)
    store_record(record_ptr, log_sum, base, delta, rng, head, tokens, indices, mask_m)


@triton.jit(do_not_specialize=VARYING_HEADS)
def disentangled_bwd_kernel(
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
    start_n, first, length = program(cu_seqlens_ptr, blocks, BLOCK)
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
        s = products(
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
            store_by_distance(
                by_query_ptr + distances, first, start_m, start_n, ds, length, width, BLOCK
            )
        if by_key_ptr is not None:
            store_by_distance(
                by_key_ptr + distances, first, start_n, start_m, ds.T, length, width, BLOCK
            )
        offsets = tl.arange(0, BLOCK)
        tile = by_pair_ptr + (pairs + start_m) * stride_pairs + start_n
        tl.store(
            tile + offsets[:, None] * stride_pairs + offsets[None, :], ds, mask=mask_m[:, None]
        )
    if rng_ptr is not None:
        dv *= drop_scale
    dv_base = dv_ptr + first.to(tl.int64) * stride_dv + head * D
    store_rows(dv_base, columns, stride_dv, columns < length, dv, D, BLOCK_D)
