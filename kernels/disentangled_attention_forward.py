"""The kernel of disentangled attention's forward, by online softmax.

Tiling: one program is (block of queries, sequence, head).
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    load_rows,
    natural_lse,
    scaled,
    store_rows,
    unit_of,
)
from fastenc.kernels.disentangled_attention_tile import VARYING, products, program
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread


@triton.jit(do_not_specialize=VARYING)
def disentangled_fwd_kernel(
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
    start_m, first, length = program(cu_seqlens_ptr, blocks, BLOCK)
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
        s = products(
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
