"""The gradients of queries, keys and tables in disentangled attention, as products of the workspace's tiles.

    dq[i] = sum_j ds[i, j] k[j] + sum_d ds[i, i + d] keys[d];        dk[j] likewise
    dkeys[d] = sum_i ds[i, i + d] q[i];                              dqueries[d] = sum_j ds[j - d, j] k[j]

Tiling: for dq and dk, one program is (block of tokens, sequence, head). For the tables it is (block of distances, chunk
of sequences, head); the chunks' sums are added in order. There are no atomics.
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_tile import head_rows, load_rows, sequence_bounds, store_rows
from fastenc.kernels.disentangled_attention_tile import distance_rows, program
from fastenc.kernels.disentangled_attention_workspace import (
    UNIT,
    VARYING_HEADS,
    load_by_distance,
)


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
        ds = load_by_distance(base, own, distance, length, width, MASKED)
        rows = distance_rows(position_ptr, origin + SIGN * first, head, SIGN, H, D, BLOCK_D, BLOCK)
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
        ds = load_by_distance(base, own, distance, length, width, MASKED)
        x = load_rows(own_base, own, stride_token, own < length, D, BLOCK_D)
        sums = tl.dot(ds.T, x, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=VARYING_HEADS)
def disentangled_bwd_rows_kernel(
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
    start, first, length = program(cu_seqlens_ptr, blocks, BLOCK)
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
def disentangled_bwd_tables_kernel(
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
