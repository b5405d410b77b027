"""What the backward of short sequences has to know of each query: a record.

It has the query's log-sum-exp, the begin of its sequence, and its key of dropout.

Tiling: one program is (BLOCK queries, head).
"""

import triton
import triton.language as tl
from fastenc.kernels.attention_short_grid import LONGEST
from fastenc.kernels.attention_tile import (
    LOG2_E,
    is_large,
    load_rows,
    new_record,
    store_record,
    with_keys,
)
from fastenc.kernels.dropout import load_rng
from fastenc.kernels.run import run
from torch import Tensor

LAUNCH = {"BLOCK": 256, "BLOCK_M": 32, "BLOCK_N": 64, "LONGEST": LONGEST, "num_warps": 4}


@triton.jit
def _query_words(lse_ptr, bounds_ptr, tokens, head, total_tokens):
    """(indices, lse, begins of the sequences, whether rounding lse would show) of tokens."""
    valid = tokens < total_tokens
    indices = head.to(tl.int64) * total_tokens + tokens
    lse = tl.load(lse_ptr + indices, mask=valid, other=0.0)
    starts = tl.load(bounds_ptr + tokens, mask=valid, other=-1)
    return indices, lse, starts, is_large(lse)


@triton.jit
def _store_large_records(
    record_ptr, lse_ptr, q, k, bounds_ptr, rng, first, head, total_tokens, unit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LONGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Those of BLOCK_M queries whose scores are computed again; q, k: (pointer to the head, stride of tokens)."""
    tokens = first + tl.arange(0, BLOCK_M)
    indices, _, row_starts, large = _query_words(lse_ptr, bounds_ptr, tokens, head, total_tokens)
    queries = load_rows(q[0], tokens, q[1], large, D, BLOCK_D)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    # No key of a short sequence is further away.
    start = tl.maximum(tl.min(tl.where(large, row_starts, total_tokens), 0), first - LONGEST)
    stop = tl.minimum(first + BLOCK_M + LONGEST, total_tokens)
    for start_n in tl.range(start, stop, BLOCK_N):
        # Keys by queries, as in the backward, which must not round a product differently.
        columns = start_n + tl.arange(0, BLOCK_N)
        mask = columns < total_tokens
        starts = tl.load(bounds_ptr + columns, mask=mask, other=-2)
        keys = load_rows(k[0], columns, k[1], mask, D, BLOCK_D)
        s = tl.dot(keys, queries.T, input_precision=PRECISION)
        s = tl.where(starts[:, None] == row_starts[None, :], s, float("-inf"))
        maxima, sums = with_keys(maxima, sums, s, unit)
    log_sum = tl.math.log2(tl.where(large, sums, 1.0))
    store_record(record_ptr, log_sum, maxima, row_starts, rng, head, tokens, indices, large)


@triton.jit(do_not_specialize=["total_tokens"])
def _attention_short_record_kernel(
    record_ptr,  # (H, total_tokens, RECORD), int32
    lse_ptr,
    q_ptr,
    k_ptr,
    bounds_ptr,
    rng_ptr,  # or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    total_tokens,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries' records for the backward, with the begin of the query's sequence as their second word.

    Those of large scores, which are rare, are formed BLOCK_M at a time, so that they take few registers.
    """
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)
    first = tl.program_id(0) * BLOCK
    rng = None
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
    tokens = first + tl.arange(0, BLOCK)
    indices, lse, starts, large = _query_words(lse_ptr, bounds_ptr, tokens, head, total_tokens)
    base, small = tl.zeros([BLOCK], tl.float32), (tokens < total_tokens) & ~large
    log_sum = tl.where(large, 0.0, lse) * LOG2_E
    store_record(record_ptr, log_sum, base, starts, rng, head, tokens, indices, small)
    if tl.max(large.to(tl.int32), 0) > 0:
        q = (q_ptr + wide_head * stride_q_head, stride_q_token)
        k = (k_ptr + wide_head // GROUP * stride_k_head, stride_k_token)
        for start_m in tl.range(first, tl.minimum(first + BLOCK, total_tokens), BLOCK_M):
            _store_large_records(
                record_ptr, lse_ptr, q, k, bounds_ptr, rng, start_m, head, total_tokens, scale * LOG2_E,
                D, BLOCK_D, BLOCK_M, BLOCK_N, LONGEST, PRECISION,
            )  # fmt: skip


def query_records(lse: Tensor, arguments: dict) -> Tensor:
    """(H, total_tokens, RECORD), int32. arguments: by shared_arguments(), bounds_ptr and total_tokens."""
    record = new_record(lse)
    named = arguments | {"lse_ptr": lse, "record_ptr": record}
    names = _attention_short_record_kernel.arg_names
    taken = {name: named[name] for name in names if name in named}
    grid = (triton.cdiv(arguments["total_tokens"], LAUNCH["BLOCK"]), arguments["H"])
    run(_attention_short_record_kernel, grid, **taken, **LAUNCH)
    return record
