"""Self-attention of short sequences: one tile of 64 or 128 tokens holds several whole sequences.

    out = dropout(softmax(scale * q k^T)) v inside each sequence

Tiling: one program is (tile, head). It takes ROWS queries at a time. All keys of a sequence are in its tile, so the
softmax needs no running statistics. The backward computes the probabilities again from lse, and delta = sum_j p_j dp_j
in the tile, so it does not read out. There are no atomics, and the result is deterministic. Keys of other sequences in
the tile are masked.

Assignment of sequences to tiles: the batch's tokens are cut into segments of BLOCK tokens. A segment takes the
sequences that begin in it. They make at most two tiles. The first has the sequences that end within BLOCK tokens of the
segment's first sequence's begin. The second has the one sequence after these, which begins in the segment and ends past
it. A program finds its tile from the bounds of the sequences at three tokens. In a greedy assignment over the whole
batch, each tile would depend on all tiles before it. A sequence of more than BLOCK tokens, which can only be the last
of a segment, is left to other kernels. Programs of empty tiles exit at once. The grid, 2 ceil(T / BLOCK) tiles, depends
on the number of tokens only. It has half as many where the host knows that all sequences have a length that divides
BLOCK, because then no second tile has tokens.

Bytes: forward 4 T H D elements, backward 7.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels.attention_tile import (
    LOG2_E,
    is_large,
    load_record,
    load_rows,
    natural_lse,
    new_record,
    probabilities,
    scaled,
    shape_constants,
    store_record,
    store_rows,
    store_sums,
    unit_of,
    with_keys,
)
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread
from fastenc.kernels.launch import tunable, warp_groups
from fastenc.kernels.run import run
from torch import Tensor

LONGEST = 128  # tokens of a sequence
WIDEST = 128  # columns of a head
WIDEST_BACKWARD = 64  # dk and dv of 128 keys fill the registers
# Of the backward with warp groups where heads share keys. They take turns in a loop, through which four warps cannot
# hold dk and dv, nor can eight with more rows.
SHARED_KEYS = {"ROWS": 64, "num_warps": 8}
# Launch of _attention_short_record_kernel.
RECORDS = {"BLOCK": 256, "BLOCK_M": 32, "BLOCK_N": 64, "LONGEST": LONGEST, "num_warps": 4}


@triton.jit(do_not_specialize=["total_tokens", "batch", "steps", "max_seqlen"])
def _sequence_bounds_kernel(
    cu_seqlens_ptr,  # (batch+1,), int32
    bounds_ptr,  # (2, total_tokens), int32: where the token's sequence begins and ends
    total_tokens,
    batch,
    steps,  # 2 ** steps > batch
    max_seqlen,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < total_tokens
    low = tl.zeros([BLOCK], tl.int32)  # a sequence that begins at or before the token
    high = low + batch  # one that begins behind it
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_ptr + middle) <= tokens
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start, end = tl.load(cu_seqlens_ptr + low), tl.load(cu_seqlens_ptr + low + 1)
    tl.device_assert(end - start <= max_seqlen, "a sequence is longer than max_seqlen", mask=mask)
    tl.device_assert(tokens < end, "cu_seqlens ends before the last token", mask=mask)
    tl.store(bounds_ptr + tokens, start, mask=mask)
    tl.store(bounds_ptr + total_tokens + tokens, end, mask=mask)


@triton.jit
def _tile(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK: tl.constexpr):
    """(first token, one past the last) of this program's tile."""
    first = tl.program_id(0) // tiles * BLOCK
    last = tl.minimum(first + BLOCK, total_tokens)
    if tiles > 1:  # else the tile is a whole segment, and nothing is read
        end = last - 1
        starts_here = tl.load(starts_ptr + first) == first
        first = tl.where(starts_here, first, tl.load(ends_ptr + first))
        last_start, last = tl.load(starts_ptr + end), tl.load(ends_ptr + end)
        last = tl.where(last - last_start > BLOCK, last_start, last)  # left to other kernels
        full = first + BLOCK
        inside = tl.load(starts_ptr + full, mask=full < total_tokens, other=2147483647)
        middle = tl.minimum(inside, last)
        if tl.program_id(0) % tiles == 1:
            first = middle
        else:
            last = middle
    return first, last


@triton.jit
def _softmax(q, k, positions, lengths, qk_scale, PRECISION: tl.constexpr):
    """(exp2 of the scores above their maxima, maxima, sums); a row that is no token, with length 0, gets zeros.

    positions: the keys' positions in each row's sequence.
    """
    s = tl.dot(q, k.T, input_precision=PRECISION)
    # Unsigned, so that a key before the sequence is past its end too.
    s = tl.where(positions.to(tl.uint32) < lengths.to(tl.uint32)[:, None], s, float("-inf"))
    exists = lengths > 0
    row_max = tl.where(exists, scaled(tl.max(s, 1), qk_scale), 0.0)
    p = tl.math.exp2(s * unit_of(row_max, qk_scale)[:, None] - row_max[:, None])
    return p, row_max, tl.where(exists, tl.sum(p, 1), 1.0)


@triton.jit(do_not_specialize=["total_tokens", "tiles", "threshold"])
def _attention_short_fwd_kernel(
    q_ptr,  # (total_tokens, H, D)
    k_ptr,  # (total_tokens, H // GROUP, D)
    v_ptr,
    out_ptr,  # (total_tokens, H, D), contiguous
    lse_ptr,  # (H, total_tokens), float32
    bounds_ptr,  # (2, total_tokens), int32: by _sequence_bounds_kernel
    rng_ptr,  # (2,), int64: seed and offset, or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    total_tokens,
    tiles,  # of a segment
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    starts_ptr, ends_ptr = bounds_ptr, bounds_ptr + total_tokens
    first, last = _tile(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK)
    if first >= last:
        return
    head = tl.program_id(1)
    wide_head = head.to(tl.int64)  # strides of heads may be long
    if rng_ptr is not None:
        rng = load_rng(rng_ptr)
    keys = first + tl.arange(0, BLOCK)
    valid = keys < last
    key_head = wide_head // GROUP
    k = load_rows(k_ptr + key_head * stride_k_head, keys, stride_k_token, valid, D, BLOCK_D)
    v = load_rows(v_ptr + key_head * stride_v_head, keys, stride_v_token, valid, D, BLOCK_D)
    # A tile of ROWS tokens takes one turn. With constant bounds the compiler knows this and makes no loop, which would
    # hold its results in registers from the start.
    ONCE: tl.constexpr = BLOCK == ROWS
    for start_m in tl.range(0 if ONCE else first, ROWS if ONCE else last, ROWS):
        tokens = (first if ONCE else start_m) + tl.arange(0, ROWS)
        mask_m = tokens < last
        row_starts = tl.load(starts_ptr + tokens, mask=mask_m, other=0)
        lengths = tl.load(ends_ptr + tokens, mask=mask_m, other=0) - row_starts
        q = load_rows(q_ptr + wide_head * stride_q_head, tokens, stride_q_token, mask_m, D, BLOCK_D)
        positions = keys[None, :] - row_starts[:, None]
        p, row_max, row_sum = _softmax(q, k, positions, lengths, scale * LOG2_E, PRECISION)
        factor = 1.0 / row_sum
        if rng_ptr is not None:
            # Not of the positions, which would stay in registers during the softmax.
            columns = spread(keys)[None, :] - spread(row_starts)[:, None]
            mask_keys = row_keys(rng, head, tokens[:, None])
            p = tl.where(is_kept(mask_keys, columns, threshold), p, 0.0)
            factor *= drop_scale
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * factor[:, None]
        store_rows(out_ptr + head * D, tokens, H * D, mask_m, out, D, BLOCK_D)
        lse = natural_lse(row_max, row_sum, scale)
        tl.store(lse_ptr + head.to(tl.int64) * total_tokens + tokens, lse, mask=mask_m)


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


@triton.jit(do_not_specialize=["total_tokens", "tiles", "threshold"])
def _attention_short_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,  # (total_tokens, H, D), contiguous
    dq_ptr,  # (total_tokens, H, D), heads next to each other
    dk_ptr,  # (total_tokens, H // GROUP, D), as dq
    dv_ptr,
    record_ptr,  # (H, total_tokens, RECORD), int32: by _attention_short_record_kernel
    sums_ptr,  # if GROUP is 1: (tiles, 3, H, D), float32, zeroed: of dq and dv over tokens, dk's are 0; or None
    bounds_ptr,
    rng_ptr,  # None without dropout; not read
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_dq,  # of tokens
    stride_dkv,
    total_tokens,
    tiles,  # of a segment
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores are keys by queries: what the products of dk and dv take on their left stays in registers.

    One program has all heads of q that read a head of keys, one after the other.
    """
    starts_ptr, ends_ptr = bounds_ptr, bounds_ptr + total_tokens
    first, last = _tile(starts_ptr, ends_ptr, total_tokens, tiles, BLOCK)
    if first >= last:
        return
    key_head = tl.program_id(1)
    wide_key_head = key_head.to(tl.int64)  # strides of heads may be long
    keys = first + tl.arange(0, BLOCK)
    valid = keys < last
    starts = tl.load(starts_ptr + keys, mask=valid, other=-2)
    k = load_rows(k_ptr + wide_key_head * stride_k_head, keys, stride_k_token, valid, D, BLOCK_D)
    v = load_rows(v_ptr + wide_key_head * stride_v_head, keys, stride_v_token, valid, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    grad_scale = scale
    if rng_ptr is not None:
        grad_scale *= drop_scale  # which the scores' gradients in the loop lack
    ds_sums = tl.zeros([BLOCK], tl.float32)
    columns = spread(keys - starts)[:, None]  # right for the queries that see the key
    ONCE: tl.constexpr = BLOCK == ROWS  # see _attention_short_fwd_kernel
    for member in tl.range(0, GROUP):
        head = key_head * GROUP + member
        wide_head = head.to(tl.int64)
        for start_m in tl.range(0 if ONCE else first, ROWS if ONCE else last, ROWS):
            tokens = (first if ONCE else start_m) + tl.arange(0, ROWS)
            mask_m = tokens < last
            # Past the tile all of these and the query are 0, which adds nothing.
            log_sum, base, row_starts, one, two = load_record(
                record_ptr, wide_head * total_tokens + tokens, mask_m
            )
            q = load_rows(
                q_ptr + wide_head * stride_q_head, tokens, stride_q_token, mask_m, D, BLOCK_D
            )
            dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D)
            s = tl.dot(k, q.T, input_precision=PRECISION)
            s = tl.where(starts[:, None] == row_starts[None, :], s, float("-inf"))
            p = probabilities(s, base[None, :], log_sum[None, :], scale * LOG2_E)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            kept = p
            if rng_ptr is not None:
                keep = is_kept((one[None, :], two[None, :]), columns, threshold)
                kept = tl.where(keep, p, 0.0)
            dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = kept * dp
            ds -= p * tl.sum(ds, 0)[None, :]
            if sums_ptr is not None:
                ds_sums += tl.sum(ds, 1)
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            dq = tl.dot(ds.T, k, input_precision=PRECISION) * grad_scale
            store_rows(dq_ptr + head * D, tokens, stride_dq, mask_m, dq, D, BLOCK_D)
    dk *= grad_scale
    if rng_ptr is not None:
        dv *= drop_scale
    store_rows(dk_ptr + key_head * D, keys, stride_dkv, valid, dk, D, BLOCK_D)
    store_rows(dv_ptr + key_head * D, keys, stride_dkv, valid, dv, D, BLOCK_D)
    if sums_ptr is not None:
        sums = sums_ptr + (tl.program_id(0) * 3 * H + key_head).to(tl.int64) * D
        dq_sum = tl.sum(ds_sums[:, None] * k.to(tl.float32), 0) * grad_scale
        store_sums(sums, dq_sum, D, BLOCK_D)
        store_sums(sums + 2 * H * D, tl.sum(dv, 0), D, BLOCK_D)


@tunable(
    "attention_short",
    bucketed=("max_seqlen",),
    candidates=(
        {"ROWS": 32, "num_warps": 8, "maxnreg": 128},  # two programs fit on a multiprocessor
        {"ROWS": 64, "num_warps": 4, "maxnreg": None},
        {"ROWS": 64, "num_warps": 8, "maxnreg": None},
        {"ROWS": 128, "num_warps": 8, "maxnreg": None},
    ),
    # Two stages: a program copies the next rows to shared memory while it computes.
    num_stages=(1, 2),
)
def config(
    head_dim: int, max_seqlen: int, backward: bool, warp_groups: bool, dropout: bool
) -> dict:
    """Launch parameters where no table has better ones.

    warp_groups: the device's matrix instructions run on groups of four warps (wgmma), which needs tiles of 64 rows.

    Where every sequence fits in 64 tokens, tiles have 64 tokens, because less of a tile is masked then. ROWS is the
    largest number of query rows without spills. The backward has fewer, because it also keeps dk and dv.
    """
    small = max_seqlen <= 64
    if warp_groups and head_dim <= 64:
        if small:
            return _launch(64, 64, 4)
        # The fastest of those measured on an H200.
        if backward and dropout and head_dim > 32:
            return _launch(LONGEST, 64, 8)  # 128 rows are 3 % faster with Triton 3.6 and spill
        halves = (head_dim <= 32 and not dropout) if backward else dropout
        return _launch(LONGEST, 64, 4) if halves else _launch(LONGEST, LONGEST, 8)
    rows = 32
    if head_dim <= 32 and (backward or not small):
        rows = 16  # narrow heads leave the compiler so much room that it unrolls past the registers
    elif head_dim <= 64 and small and not backward:
        rows = 64
    return _launch(64, rows, 4) if small else _launch(LONGEST, rows, 8)


def _launch(block: int, rows: int, num_warps: int) -> dict:
    tile = {"BLOCK": block, "ROWS": rows, "num_warps": num_warps}
    return {**tile, "num_stages": 1, "maxnreg": None}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, length in product((32, 64, 96, 128), (64, 128)):
        for backward in (False, True) if dim <= WIDEST_BACKWARD else (False,):
            key = {"max_seqlen": length, "backward": backward, "head_dim": dim}
            yield {**key, "dropout": True, "dtype": "bfloat16"}
    for backward, dropout in product((False, True), (False, True)):
        key = {"max_seqlen": 128, "backward": backward, "head_dim": 64}
        yield {**key, "dropout": dropout, "dtype": "float16"}
    for backward in (False, True):
        key = {"max_seqlen": 128, "backward": backward, "head_dim": 32}
        yield {**key, "dropout": False, "dtype": "bfloat16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    if not key["backward"]:
        yield "", _attention_short_fwd_kernel, shape_constants(key)
        return
    yield "", _attention_short_bwd_kernel, shape_constants(key)
    if key["max_seqlen"] > 64:
        constants = {**shape_constants(key), "GROUP": 3, "sums_ptr": None}
        if key["warp_groups"]:
            constants |= SHARED_KEYS
        yield " of shared keys", _attention_short_bwd_kernel, constants
    yield " without sums", _attention_short_bwd_kernel, {**shape_constants(key), "sums_ptr": None}


def sequence_bounds(cu_seqlens: Tensor, total_tokens: int, max_seqlen: int) -> Tensor:
    """(2, total_tokens), int32: the begin and the end of each token's sequence."""
    cu_seqlens, batch = cu_seqlens.contiguous(), cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.new_empty((2, total_tokens))
    if total_tokens:
        run(
            _sequence_bounds_kernel,
            (triton.cdiv(total_tokens, 256),),
            cu_seqlens,
            bounds,
            total_tokens,
            batch,
            batch.bit_length(),
            max_seqlen,
            BLOCK=256,
            num_warps=4,
        )
    return bounds


def forward(
    out: Tensor, lse: Tensor, bounds: Tensor | None, max_seqlen: int, arguments: dict
) -> None:
    """Write out and lse. bounds: the result of sequence_bounds, or None to compute it here."""
    launch = _config(max_seqlen, False, arguments)
    tensors = {"out_ptr": out, "lse_ptr": lse}
    _run(_attention_short_fwd_kernel, bounds, max_seqlen, launch, arguments | tensors)


def backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    bounds: Tensor | None,
    max_seqlen: int,
    wants_sums: bool,
    arguments: dict,
) -> Tensor | None:
    """Write the gradients dq, dk and dv, of which dk and dv have the same token stride.

    Returns: their sums over each tile's tokens, float32 (tiles, 3, H, D), or None.
    """
    dq, dk, dv = gradients
    launch = _config(max_seqlen, True, arguments)
    sums = None
    if wants_sums:
        segments, tiles = _tiles(arguments, max_seqlen, launch)
        shape = (segments * tiles, 3, arguments["H"], arguments["D"])
        sums = torch.zeros(shape, dtype=torch.float32, device=dq.device)
    total_tokens = arguments["total_q"]
    if total_tokens and bounds is None:
        bounds = sequence_bounds(arguments["cu_seqlens_q_ptr"], total_tokens, max_seqlen)
    record = new_record(lse)
    if total_tokens:
        named = arguments | {"lse_ptr": lse, "record_ptr": record, "bounds_ptr": bounds}
        named["total_tokens"] = total_tokens
        names = _attention_short_record_kernel.arg_names
        taken = {name: named[name] for name in names if name in named}
        grid = (triton.cdiv(total_tokens, RECORDS["BLOCK"]), arguments["H"])
        run(_attention_short_record_kernel, grid, **taken, **RECORDS)
    tensors = {
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "record_ptr": record,
        "sums_ptr": sums,
        "stride_dq": dq.stride(0),
        "stride_dkv": dk.stride(0),
    }
    _run(
        _attention_short_bwd_kernel,
        bounds,
        max_seqlen,
        launch,
        arguments | tensors,
        arguments["GROUP"],
    )
    return sums


def _config(max_seqlen: int, backward: bool, arguments: dict) -> dict:
    shared = backward and arguments["GROUP"] > 1
    groups = warp_groups(arguments["q_ptr"].device)
    launch = config(
        arguments["D"],
        LONGEST if shared else min(max_seqlen, LONGEST),
        backward,
        groups,
        arguments["threshold"] > 0,
        like=arguments["q_ptr"],
    )
    return launch | SHARED_KEYS if shared and groups else launch


def _tiles(arguments: dict, max_seqlen: int, launch: dict) -> tuple[int, int]:
    """(segments, tiles of a segment).

    A batch of as many tokens as sequences of max_seqlen have has no others. If their length divides BLOCK, each segment
    is one whole tile.
    """
    total_tokens, batch = arguments["total_q"], arguments["cu_seqlens_q_ptr"].shape[0] - 1
    whole = total_tokens == batch * max_seqlen and launch["BLOCK"] % max(1, max_seqlen) == 0
    return triton.cdiv(total_tokens, launch["BLOCK"]), 1 if whole else 2


def _run(
    kernel, bounds: Tensor | None, max_seqlen: int, launch: dict, arguments: dict, group: int = 1
) -> None:
    """arguments: those of the kernels for any length; this kernel gets the ones that it has parameters for.

    group: heads of q of a program.
    """
    total_tokens = arguments["total_q"]
    if total_tokens == 0:
        return
    if bounds is None:
        bounds = sequence_bounds(arguments["cu_seqlens_q_ptr"], total_tokens, max_seqlen)
    segments, tiles = _tiles(arguments, max_seqlen, launch)
    named = arguments | {"bounds_ptr": bounds, "total_tokens": total_tokens, "tiles": tiles}
    taken = {name: named[name] for name in kernel.arg_names if name in named}
    run(kernel, (segments * tiles, arguments["H"] // group), **taken, **launch)
