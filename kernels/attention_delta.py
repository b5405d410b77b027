"""What attention's backward has to know of each query: a record of its log-sum-exp, delta and key of dropout.

    delta[h, i] = sum_d out[i, h, d] * dout[i, h, d] - dlse[h, i]

The sum is sum_j p_ij dp_ij, dropout included. Where rounding the log-sum-exp would show in the probabilities, the
query's scores are computed again for their maximum and the sum of exponentials above it.

Tiling: one program is (block of BLOCK_M queries, sequence, head).
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_arguments import contiguous, is_biased
from fastenc.kernels.attention_grid import block_grid, program, visible_blocks
from fastenc.kernels.attention_qkv import precision_of
from fastenc.kernels.attention_tile import (
    LOG2_E,
    head_rows,
    is_large,
    load_rows,
    new_record,
    score_unit,
    sequence_bounds,
    sequence_keys,
    store_record,
    tile_scores,
    with_keys,
)
from fastenc.kernels.dropout import load_rng
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _maxima_and_sums(
    q, rows, start, stop, keys, biases, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(maxima of tile_scores' results over keys from start to stop, sums of the exponentials of score minus maximum).

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
    block, sequence, head = program(blocks_ptr, blocks, H, BLOCK_M)
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
        start, stop = visible_blocks(
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


def config(head_dim: int, precision: str, biased: bool) -> dict:
    """Launch parameters of the kernel of delta: its branch for large scores must not take the registers of the rest.

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


def query_records(
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    blocks_table: Tensor | None,
    max_seqlen: int,
    arguments: dict,
) -> Tensor:
    """(H, total_q, RECORD), int32. arguments: by shared_arguments(), and dout_ptr."""
    record = new_record(lse)
    launch = config(arguments["D"], precision_of(arguments), is_biased(arguments))
    of_grid, grid = block_grid(blocks_table, max_seqlen, launch["BLOCK_M"], arguments)
    own = {"out_ptr": out, "dlse_ptr": contiguous(dlse), "lse_ptr": lse, "record_ptr": record}
    named = arguments | own | of_grid
    taken = {name: named[name] for name in _attention_delta_kernel.arg_names if name in named}
    if 0 not in grid:
        run(_attention_delta_kernel, grid, **taken, **launch)
    return record
