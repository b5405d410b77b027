"""Attention in which a block of queries sees the blocks of keys that a plan names, forward and backward.

    s[i, j] = scale * q[i] . k[j] + log n[i, j];  out = softmax(s) v;  lse = log sum_j exp(s[i, j])

n counts how often the plan's row of query i's block names key j's block. For dk and dv, the host sorts the plan's
entries by the block of keys; the sort is stable.

Bytes: forward 4 T H D elements, and the blocks of keys that several rows name from the cache. FLOPs: forward 4 D for
each pair of tokens that is named, backward 14 D.
Source: Zaheer et al. 2020, arXiv:2007.14062; Dao 2023, arXiv:2307.08691.
"""

from typing import Any

import torch
import triton
from fastenc.kernels.attention_qkv import precision_of, qkv_arguments
from fastenc.kernels.attention_tile import new_record
from fastenc.kernels.block_sparse_attention_config import KERNELS, config
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.run import run
from torch import Tensor


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
    rows = q.shape[0] // block_size + cu_seqlens.shape[0] - 1
    return {
        **qkv_arguments(q, k, v),
        "starts_ptr": starts.contiguous(),
        "blocks_ptr": columns.contiguous(),
        "counts_ptr": counts.contiguous(),
        "cu_seqlens_ptr": cu_seqlens.contiguous(),
        "plan_rows": rows if starts.shape[0] - 1 > rows else 0,
        "longest": max_seqlen,
        "scale": scale,
        "SIZE": block_size,
    }


def _run(name: str, shared: dict, **own: Any) -> None:
    """Run a kernel with a program for each tile of a sequence and head. own: arguments that other kernels have not."""
    launch = config(
        name,
        shared["D"],
        precision_of(shared),
        like=shared["q_ptr"],
        max_seqlen=shared["longest"],
    )
    per_block = triton.cdiv(shared["SIZE"], launch["BLOCK"])
    tiles = triton.cdiv(shared["longest"], shared["SIZE"]) * per_block
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    taken = {**shared, **own, "tiles": tiles}
    arguments = {key: taken[key] for key in KERNELS[name].arg_names if key in taken}
    if tiles * batch:
        run(KERNELS[name], (tiles * batch, shared["H"]), **arguments, **launch)


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
    all_rows = starts.shape[0] - 1
    rows = shared["plan_rows"] or all_rows  # of one plan
    entry = torch.arange(columns.shape[0], device=columns.device, dtype=starts.dtype)
    row = torch.searchsorted(starts[1:], entry, right=True)  # all_rows for an entry that no row has
    in_plan = row % rows
    block = in_plan - first[torch.searchsorted(first, in_plan, right=True) - 1]
    key_row = torch.where(row < all_rows, row - block + columns, all_rows)
    key_row, order = torch.sort(key_row, stable=True)
    bounds = torch.arange(all_rows + 1, device=columns.device)
    return {
        "starts_ptr": torch.searchsorted(key_row, bounds).int(),
        "blocks_ptr": block[order].int(),
        "counts_ptr": counts[order],
    }
