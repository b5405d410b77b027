"""Gradient of a table of relative-position biases: deterministic sums of the scores' gradients over diagonals.

    drelative[h, clamp(j - i, -R, R) + R] = sum over sequences, i, j of ds[h, i, j]

Tiling: one program is (band, chunk of sequences, head). A band is one diagonal of blocks. The same element of all its
tiles has the same distance j - i, so the program adds the tiles up in registers and sums the diagonals of the result
once. The scores are computed again, by two more products beside the backward's five. There are no atomics. The only
buffer is the small one for the sums of bands and chunks.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    load_record_once,
    load_rows,
    probabilities,
    score_gradients,
    sequence_bounds,
    sequence_keys,
    tile_scores,
)
from fastenc.kernels.run import run
from torch import Tensor

CHUNKS = 16


@triton.jit(
    do_not_specialize=["total_q", "batch", "first_band", "threshold", "span", "left", "right"]
)
def _attention_bwd_relative_kernel(
    q_ptr,  # (total_q, H, D)
    k_ptr,  # (total_k, H // GROUP, D)
    v_ptr,  # as k
    dout_ptr,  # (total_q, H, D), contiguous
    partial_ptr,  # (chunks, H, bands, 2, BLOCK), float32
    record_ptr,  # (H, total_q, RECORD), int32: by attention_delta.py
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rng_ptr,  # None without dropout; not read
    alibi_ptr,
    relative_ptr,
    key_bias_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    total_q,
    batch,
    first_band,
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
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[..., 0, c]: sums for distance (band - 1) * BLOCK + c; partial[..., 1, c]: for band * BLOCK + c."""
    chunk, head = tl.program_id(1), tl.program_id(2)
    band = first_band + tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for sequence in tl.range(chunk, batch, tl.num_programs(1)):
        first_q, length_q = sequence_bounds(cu_seqlens_q_ptr, sequence)
        first_k, length_k = sequence_bounds(cu_seqlens_k_ptr, sequence)
        shift = length_k - length_q
        keys = sequence_keys(
            k_ptr,
            v_ptr,
            stride_k_token,
            stride_k_head,
            stride_v_token,
            stride_v_head,
            first_k,
            length_k,
            head // GROUP,
        )
        biases = (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_k)
        q_base = head_rows(q_ptr, first_q, stride_q_token, head, stride_q_head)
        dout_base = dout_ptr + first_q.to(tl.int64) * (H * D) + head * D
        statistics = head.to(tl.int64) * total_q + first_q
        # Query block m meets keys m + shift + band * BLOCK and on, of which some must exist.
        start = tl.maximum(0, 1 - BLOCK - shift - band * BLOCK) // BLOCK * BLOCK
        stop = tl.minimum(length_q, length_k - shift - band * BLOCK)
        for start_m in tl.range(start, stop, BLOCK):
            offs_m = start_m + offsets
            mask_m = offs_m < length_q
            offs_n = start_m + shift + band * BLOCK + offsets
            k_base, v_base, stride_k, stride_v, _ = keys
            mask_n = (offs_n >= 0) & (offs_n < length_k)
            q = load_rows(q_base, offs_m, stride_q_token, mask_m, D, BLOCK_D)
            dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
            k = load_rows(k_base, offs_n, stride_k, mask_n, D, BLOCK_D)
            v = load_rows(v_base, offs_n, stride_v, mask_n, D, BLOCK_D)
            log_sum, base, second, one, two = load_record_once(
                record_ptr, statistics + offs_m, mask_m
            )
            delta = second.to(tl.float32, bitcast=True)
            columns = tl.where(mask_n, offs_n, length_k)  # one that does not exist
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s = tile_scores(
                s,
                (offs_m + shift)[:, None],
                columns[None, :],
                length_k,
                scale,
                biases,
                WINDOW,
                True,
            )
            # The scores of no query are its biases, of any size.
            base = tl.where(mask_m, base, float("inf"))
            p = probabilities(s, base[:, None], log_sum[:, None], LOG2_E)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)
            dropout = (None, threshold)
            if rng_ptr is not None:
                dropout = ((one[:, None], two[:, None]), threshold)
            _, ds = score_gradients(p, dp, delta[:, None], offs_n[None, :], dropout)
            sums += ds
    if rng_ptr is not None:
        sums *= drop_scale
    # Row m moved left by m: a column then holds distance c, or c - BLOCK in the rows that wrapped around.
    target = offsets[None, :] + offsets[:, None]
    rolled = tl.gather(sums, target % BLOCK, axis=1)
    out = ((chunk * H + head) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (2 * BLOCK)
    tl.store(partial_ptr + out + offsets, tl.sum(tl.where(target >= BLOCK, rolled, 0.0), 0))
    tl.store(partial_ptr + out + BLOCK + offsets, tl.sum(tl.where(target < BLOCK, rolled, 0.0), 0))


def config(head_dim: int, precision: str) -> dict:
    """Launch parameters: the largest blocks that sm_80's registers hold.

    precision: "half" for 2-byte types, else the precision of float32 products.
    """
    if head_dim <= 64 or (precision == "half" and head_dim <= 128):
        return {"BLOCK": 32, "num_warps": 4 if precision == "half" else 8, "num_stages": 2}
    return {"BLOCK": 16, "num_warps": 4, "num_stages": 2}


def relative_bias_gradient(
    relative_bias: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    batch: int,
    launch: dict,
    **arguments,
) -> Tensor:
    """(num_heads, 2 R + 1), dtype of relative_bias. launch: by config(); arguments: the kernel's other arguments."""
    heads, columns = relative_bias.shape
    block = launch["BLOCK"]
    # Distances run from -(length_k - 1) to length_q - 1.
    farthest_left = min(arguments["left"], max_seqlen_k - 1)
    farthest_right = min(arguments["right"], max_seqlen_q - 1)
    if farthest_left < 0 or farthest_right < 0 or batch == 0:
        return torch.zeros_like(relative_bias)
    first_band = -triton.cdiv(farthest_left, block)
    last_band = min(triton.cdiv(farthest_right, block), (max_seqlen_q - 1) // block)
    bands = last_band - first_band + 1
    chunks = min(batch, CHUNKS)
    partial = relative_bias.new_empty((chunks, heads, bands, 2, block), dtype=torch.float32)
    run(
        _attention_bwd_relative_kernel,
        (bands, chunks, heads),
        partial_ptr=partial,
        batch=batch,
        first_band=first_band,
        **arguments,
        **launch,
    )
    below, above = partial.sum(0).unbind(2)
    sums = F.pad(below.flatten(1), (0, block)) + F.pad(above.flatten(1), (block, 0))
    return _clamped(sums, (first_band - 1) * block, columns // 2).to(relative_bias.dtype)


def _clamped(sums: Tensor, first: int, span: int) -> Tensor:
    """Column i of ``sums`` is for distance first + i. Distances beyond the span are added to the table's ends."""
    begin, end = max(0, -span - first), span - first + 1
    table = F.pad(sums[:, begin:end], (max(0, first + span), max(0, end - sums.shape[1])))
    table[:, 0] += sums[:, :begin].sum(1)
    table[:, -1] += sums[:, end:].sum(1)
    return table
