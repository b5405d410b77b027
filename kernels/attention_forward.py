"""The kernel of attention's forward, by online softmax.

Tiling: one program is (block of BLOCK_M queries, sequence, head). It reads the keys inside its window, BLOCK_N at a
time, with a running row maximum and row sum. Without a window only the last block is masked.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_arguments import VARYING
from fastenc.kernels.attention_grid import program, visible_blocks
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    load_keys,
    load_rows,
    natural_lse,
    scaled,
    sequence_bounds,
    sequence_keys,
    store_rows,
    tile_scores,
    unit_of,
)
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread


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
    length_k = keys[4]
    for start_n in tl.range(start, stop, BLOCK_N):
        columns = start_n + tl.arange(0, BLOCK_N)
        k, v = load_keys(keys, columns, MASKED, D, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tile_scores(s, rows[:, None], columns[None, :], length_k, scale, biases, WINDOW, MASKED)
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
def attention_fwd_kernel(
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
    block, sequence, head = program(blocks_ptr, blocks, H, BLOCK_M)
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
    start, stop = visible_blocks(start_m + shift, length_k, left, right, BLOCK_N, BLOCK_M, WINDOW)
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
