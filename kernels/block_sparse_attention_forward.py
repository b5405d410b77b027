"""The kernel of block-sparse attention's forward, by online softmax.

Tiling: one program is (tile of queries, sequence, head). It goes through the tiles of the blocks that its row of the
plan names.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import LOG2_E, head_rows, load_rows, store_rows
from fastenc.kernels.block_sparse_attention_tile import (
    VARYING,
    plan_entry,
    program,
    tile_scores,
    tile_tokens,
)


@triton.jit(do_not_specialize=VARYING)
def block_sparse_fwd_kernel(
    q_ptr,  # (total_q, H, D)
    k_ptr,
    v_ptr,
    out_ptr,  # (total_q, H, D), contiguous
    lse_ptr,  # (H, total_q), float32
    starts_ptr,  # int32, the entries of a plan's rows
    blocks_ptr,  # int32, the block of each entry
    counts_ptr,  # int32
    cu_seqlens_ptr,  # (batch+1,), int32
    stride_token,  # of q, k and v
    stride_head,
    total_q,
    tiles,  # of the longest sequence
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
    q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_n, keys, log_count = plan_entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        columns, valid = tile_tokens(start_n, keys, length, SIZE, BLOCK)
        k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
        s = tile_scores(q, k, valid, scale, log_count, PRECISION)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.math.exp2((s - new_max[:, None]) * LOG2_E)
        rescale = tl.math.exp2((row_max - new_max) * LOG2_E)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    out_base = out_ptr + first.to(tl.int64) * (H * D) + head * D
    # A row that names no block has no sum; its lse is -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    store_rows(out_base, offs_m, H * D, mask_m, acc / row_sum[:, None], D, BLOCK_D)
    lse = row_max + tl.math.log2(row_sum) / LOG2_E
    tl.store(lse_ptr + head.to(tl.int64) * total_q + first + offs_m, lse, mask=mask_m)
