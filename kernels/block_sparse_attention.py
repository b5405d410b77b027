"""Attention in which a block of queries sees the blocks of keys that a plan names, forward and backward.

    s[i, j] = scale * q[i] . k[j] + log n[i, j];  out = softmax(s) v;  lse = log sum_j exp(s[i, j])

n counts how often the plan's row of query i's block names key j's block.

Tiling: a block of the plan is cut into tiles of BLOCK tokens. A program is (tile of queries, sequence, head), and goes
through the tiles of the blocks that its row names, by online softmax. For dk and dv it is a tile of keys, and goes
through the rows that name its block: the host sorts the entries by the block of keys, and the sort is stable. Two
kernels compute dq, and dk and dv, so nothing is added atomically, and all sums have one order.

Bytes: forward 4 T H D elements, and the blocks of keys that several rows name from the cache. FLOPs: forward 4 D for
each pair of tokens that is named, backward 14 D.
Source: Zaheer et al. 2020, arXiv:2007.14062; Dao 2023, arXiv:2307.08691.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
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
from fastenc.kernels.launch import tunable
from fastenc.kernels.run import run
from torch import Tensor

VARYING = ["total_q", "tiles", "plan_rows"]


@triton.jit
def _program(cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(first token of the tile in its sequence, its block, first token and length of the sequence, head, first and last
    entry of the block's row). plan_rows: between the plans of two heads, 0 with one plan."""
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tile, sequence, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles, tl.program_id(1)
    first, length = sequence_bounds(cu_seqlens_ptr, sequence)
    block = tile // per_block
    start = block * SIZE + tile % per_block * BLOCK
    row = head * plan_rows + first // SIZE + sequence + block
    exists = start < length
    begin = tl.load(starts_ptr + row, mask=exists, other=0)
    end = tl.load(starts_ptr + row + 1, mask=exists, other=0)
    return start, block, first, length, head, begin, end


@triton.jit
def _tile_tokens(start, block, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens of a tile, which of them exist and are the block's)."""
    tokens = start + tl.arange(0, BLOCK)
    return tokens, (tokens < length) & (tokens < (block + 1) * SIZE)


@triton.jit
def _entry(blocks_ptr, counts_ptr, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(first token, block, logarithm of the count) of one tile of an entry's block; index: entry * tiles + tile."""
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block = tl.load(blocks_ptr + index // per_block)
    count = tl.load(counts_ptr + index // per_block).to(tl.float32)
    return block * SIZE + index % per_block * BLOCK, block, tl.math.log2(count) / LOG2_E


@triton.jit
def _scores(q, k, valid, scale, log_count, PRECISION: tl.constexpr):
    """Queries by keys, -inf for keys that are not there."""
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale + log_count
    return tl.where(valid[None, :], s, float("-inf"))


@triton.jit(do_not_specialize=VARYING)
def _block_sparse_fwd_kernel(
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
    start, block, first, length, head, begin, end = _program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    offs_m, mask_m = _tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_n, keys, log_count = _entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        columns, valid = _tile_tokens(start_n, keys, length, SIZE, BLOCK)
        k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
        s = _scores(q, k, valid, scale, log_count, PRECISION)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.math.exp2((s - new_max[:, None]) * LOG2_E)
        rescale = tl.math.exp2((row_max - new_max) * LOG2_E)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    out_base = out_ptr + first.to(tl.int64) * (H * D) + head * D
    row_sum = tl.where(
        row_sum == 0.0, 1.0, row_sum
    )  # of a row that names no block, whose lse is -inf
    store_rows(out_base, offs_m, H * D, mask_m, acc / row_sum[:, None], D, BLOCK_D)
    lse = row_max + tl.math.log2(row_sum) / LOG2_E
    tl.store(lse_ptr + head.to(tl.int64) * total_q + first + offs_m, lse, mask=mask_m)


@triton.jit(do_not_specialize=VARYING)
def _block_sparse_record_kernel(
    q_ptr,
    k_ptr,
    out_ptr,  # (total_q, H, D), contiguous
    dout_ptr,  # as out
    lse_ptr,  # (H, total_q), float32
    record_ptr,  # (H, total_q, RECORD), int32
    starts_ptr,
    blocks_ptr,
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries' records, with sum_d out dout as their second word.

    Where rounding lse would show in the probabilities, they are divided by their sum, which this kernel forms.
    """
    start, block, first, length, head, begin, end = _program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    offs_m, mask_m = _tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    tokens = first + offs_m
    indices = head.to(tl.int64) * total_q + tokens
    out = load_rows(out_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = load_rows(dout_ptr + head * D, tokens, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * dout, 1).to(tl.int32, bitcast=True)
    base = tl.load(lse_ptr + indices, mask=mask_m, other=0.0)
    sums = tl.full([BLOCK], 1.0, tl.float32)
    large = is_large(base)
    if tl.max(large.to(tl.int32), 0) > 0:
        q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
        k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for index in tl.range(begin * per_block, end * per_block):
            start_n, keys, log_count = _entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
            columns, valid = _tile_tokens(start_n, keys, length, SIZE, BLOCK)
            k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
            s = _scores(q, k, valid, scale, log_count, PRECISION)
            higher = tl.maximum(maxima, tl.max(s, 1))
            total *= tl.math.exp2((maxima - higher) * LOG2_E)
            total += tl.sum(tl.math.exp2((s - higher[:, None]) * LOG2_E), 1)
            maxima = higher
        base = tl.where(large, maxima, base)
        sums = tl.where(large, total, sums)
    store_record(
        record_ptr, tl.math.log2(sums), base, delta, None, head, tokens, indices, mask_m
    )  # fmt: skip


@triton.jit
def _tile_gradients(
    q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(probabilities, gradients of the scores), queries by keys."""
    log_sum, base, delta, _, _ = load_record_once(record_ptr, statistics + offs_m, mask_m)
    base = tl.where(mask_m, base, float("inf"))  # no query has no probabilities
    s = _scores(q, k, valid, scale, log_count, PRECISION)
    p = probabilities(s, base[:, None], log_sum[:, None], LOG2_E)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    delta = delta.to(tl.float32, bitcast=True)
    return score_gradients(p, dp, delta[:, None], offs_m[:, None], (None, 0))


@triton.jit(do_not_specialize=VARYING)
def _block_sparse_bwd_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dk_ptr,  # (total_q, H, D), heads next to each other
    dv_ptr,
    record_ptr,
    starts_ptr,  # of the entries sorted by the blocks of keys
    blocks_ptr,  # the blocks of queries
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dk and dv
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, block, first, length, head, begin, end = _program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    columns, valid = _tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
    v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_m, queries, log_count = _entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        offs_m, mask_m = _tile_tokens(start_m, queries, length, SIZE, BLOCK)
        q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
        dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
        p, ds = _tile_gradients(
            q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count, PRECISION
        )  # fmt: skip
        dv = tl.dot(p.to(dout.dtype).T, dout, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    offset = first.to(tl.int64) * stride_grad + head * D
    store_rows(dk_ptr + offset, columns, stride_grad, valid, dk * scale, D, BLOCK_D)
    store_rows(dv_ptr + offset, columns, stride_grad, valid, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=VARYING)
def _block_sparse_bwd_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,  # (total_q, H, D), heads next to each other
    record_ptr,
    starts_ptr,
    blocks_ptr,
    counts_ptr,
    cu_seqlens_ptr,
    stride_token,
    stride_head,
    stride_grad,  # of tokens in dq
    total_q,
    tiles,
    plan_rows,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    start, block, first, length, head, begin, end = _program(
        cu_seqlens_ptr, starts_ptr, tiles, plan_rows, SIZE, BLOCK
    )
    if start >= length:
        return
    offs_m, mask_m = _tile_tokens(start, block, length, SIZE, BLOCK)
    per_block: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    q_base = head_rows(q_ptr, first, stride_token, head, stride_head)
    k_base = head_rows(k_ptr, first, stride_token, head, stride_head)
    v_base = head_rows(v_ptr, first, stride_token, head, stride_head)
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    statistics = head.to(tl.int64) * total_q + first
    q = load_rows(q_base, offs_m, stride_token, mask_m, D, BLOCK_D)
    dout = load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for index in tl.range(begin * per_block, end * per_block):
        start_n, keys, log_count = _entry(blocks_ptr, counts_ptr, index, SIZE, BLOCK)
        columns, valid = _tile_tokens(start_n, keys, length, SIZE, BLOCK)
        k = load_rows(k_base, columns, stride_token, valid, D, BLOCK_D)
        v = load_rows(v_base, columns, stride_token, valid, D, BLOCK_D)
        _, ds = _tile_gradients(
            q, k, v, dout, statistics, offs_m, mask_m, valid, record_ptr, scale, log_count, PRECISION
        )  # fmt: skip
        dq = tl.dot(ds.to(q.dtype), k, dq, input_precision=PRECISION)
    offset = first.to(tl.int64) * stride_grad + head * D
    store_rows(dq_ptr + offset, offs_m, stride_grad, mask_m, dq * scale, D, BLOCK_D)


@tunable(
    "block_sparse_attention",
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
        return {"BLOCK": 16, "num_warps": 8, "num_stages": 1}
    if precision == "tf32":
        return {"BLOCK": 16 if head_dim > 64 else 32, "num_warps": 4, "num_stages": 1}
    block = 32 if head_dim > 64 else 64
    return {"BLOCK": block, "num_warps": 4 if kernel == "forward" else 8, "num_stages": 2}


_KERNELS: dict[str, Any] = {
    "forward": _block_sparse_fwd_kernel,
    "record": _block_sparse_record_kernel,
    "backward_kv": _block_sparse_bwd_kv_kernel,
    "backward_q": _block_sparse_bwd_q_kernel,
}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, kernel in product((64, 128), ("half", "tf32", "ieee"), _KERNELS):
        dtype = "float16" if precision == "half" else "float32"
        yield {"kernel": kernel, "head_dim": dim, "precision": precision, "dtype": dtype}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    yield "", _KERNELS[key["kernel"]], {**shape_constants({**key, "dropout": True}), "SIZE": 64}


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    columns: Tensor,
    counts: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    block_size: int,
    scale: float,
) -> dict:
    """The arguments and constants that all kernels share."""
    if q.stride(2) != 1 or not q.stride() == k.stride() == v.stride():
        q, k, v = (x.contiguous() for x in (q, k, v))
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    heads, head_dim = q.shape[1:]
    rows = q.shape[0] // block_size + cu_seqlens.shape[0] - 1
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "starts_ptr": starts.contiguous(),
        "blocks_ptr": columns.contiguous(),
        "counts_ptr": counts.contiguous(),
        "cu_seqlens_ptr": cu_seqlens.contiguous(),
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "total_q": q.shape[0],
        "plan_rows": rows if starts.shape[0] - 1 > rows else 0,
        "longest": max_seqlen,
        "scale": scale,
        "H": heads,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "SIZE": block_size,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _run(name: str, shared: dict, **own: Any) -> None:
    """Run a kernel with a program for each tile of a sequence and head. own: arguments that other kernels have not."""
    launch = config(
        name,
        shared["D"],
        shared["PRECISION"] if shared["q_ptr"].dtype == torch.float32 else "half",
        like=shared["q_ptr"],
        max_seqlen=shared["longest"],
    )
    per_block = triton.cdiv(shared["SIZE"], launch["BLOCK"])
    tiles = triton.cdiv(shared["longest"], shared["SIZE"]) * per_block
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    taken = {**shared, **own, "tiles": tiles}
    arguments = {key: taken[key] for key in _KERNELS[name].arg_names if key in taken}
    if tiles * batch:
        run(_KERNELS[name], (tiles * batch, shared["H"]), **arguments, **launch)


def block_sparse_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). arguments: those of the op's schema after v."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _run("forward", _arguments(q, k, v, *arguments), out_ptr=out, lse_ptr=lse)
    return out, lse


def block_sparse_attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """(dqkv, dbias). rest: the arguments of the op's schema after v."""
    *arguments, wants_bias = rest
    shared = _arguments(q, k, v, *arguments)
    shared |= {"dout_ptr": dout.contiguous(), "record_ptr": new_record(lse)}
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    dq, dk, dv = dqkv.unbind(1)
    shared["stride_grad"] = dq.stride(0)
    _run("record", shared, out_ptr=out, lse_ptr=lse)
    _run("backward_q", shared, dq_ptr=dq)
    if q.shape[0]:
        _run("backward_kv", {**shared, **_by_keys(shared)}, dk_ptr=dk, dv_ptr=dv)
    dbias = column_sum(dqkv.flatten(1)) if wants_bias else q.new_empty(0, dtype=torch.float32)
    return dqkv, dbias


def _by_keys(shared: dict) -> dict[str, Tensor]:
    """The plan's entries sorted by the blocks of keys: starts, blocks of queries and counts."""
    starts, columns, counts = (shared[f"{name}_ptr"] for name in ("starts", "blocks", "counts"))
    offsets = shared["cu_seqlens_ptr"][:-1]
    first = offsets // shared["SIZE"] + torch.arange(len(offsets), device=offsets.device)
    rows, every = shared["plan_rows"] or starts.shape[0] - 1, starts.shape[0] - 1
    entry = torch.arange(columns.shape[0], device=columns.device, dtype=starts.dtype)
    row = torch.searchsorted(starts[1:], entry, right=True)  # `every` for an entry that no row has
    in_plan = row % rows
    block = in_plan - first[torch.searchsorted(first, in_plan, right=True) - 1]
    key_row = torch.where(row < every, row - block + columns, every)
    key_row, order = torch.sort(key_row, stable=True)
    bounds = torch.arange(every + 1, device=columns.device)
    return {
        "starts_ptr": torch.searchsorted(key_row, bounds).int(),
        "blocks_ptr": block[order].int(),
        "counts_ptr": counts[order],
    }
