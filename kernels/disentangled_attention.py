"""Attention whose scores also compare content with relative positions, forward and backward, by online softmax.

    s[i, j] = scale * (q[i] . k[j] + q[i] . keys[d] + k[j] . queries[d]),  d = j - i
    out = dropout(softmax(s)) v;  lse = log sum_j exp(s[i, j])

A kernel expands the tables to a row for each distance d, at d + origin (disentangled_attention_tables.py). The backward
computes the scores once, and writes their gradients to a workspace; the other gradients are products of its tiles.

Bytes: forward 4 T H D elements; the backward writes ds three times and reads it six times. FLOPs: with both terms
12 H D sum(length^2) forward, 26 backward.
Source: He et al. 2020, arXiv:2006.03654; Dao 2023, arXiv:2307.08691.
"""

from typing import Any

import torch
import triton
from fastenc.kernels.attention_qkv import precision_of, qkv_arguments
from fastenc.kernels.attention_tile import new_record
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.disentangled_attention_config import KERNELS, config
from fastenc.kernels.disentangled_attention_tables import expand_table, table_gradient
from fastenc.kernels.disentangled_attention_workspace import MARGIN, new_workspace
from fastenc.kernels.dropout import threshold_and_scale
from fastenc.kernels.launch import warp_groups
from fastenc.kernels.run import run
from torch import Tensor

SUMS = 2048  # programs of the tables' gradients, unless a single chunk of sequences has more


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    slots: Tensor,
    cu_seqlens: Tensor,
    rng_state: Tensor | None,
    max_seqlen: int,
    dropout_p: float,
    scale: float,
) -> dict:
    """The arguments and constants that the kernels share."""
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    longest = max(1, max_seqlen)
    origin = longest + MARGIN
    return {
        **qkv_arguments(q, k, v),
        "position_keys_ptr": expand_table(position_keys, slots, origin),
        "position_queries_ptr": expand_table(position_queries, slots, origin),
        "cu_seqlens_ptr": cu_seqlens.contiguous(),
        "rng_ptr": rng_state if threshold else None,
        "longest": longest,
        "origin": origin,
        "scale": scale,
        "threshold": threshold,
        "drop_scale": drop_scale,
    }


def _prepare(name: str, shared: dict, **own: Any) -> dict:
    """All arguments of a kernel, and its launch parameters. own: those that other kernels do not have."""
    launch = config(
        name,
        shared["D"],
        precision_of(shared),
        warp_groups(shared["q_ptr"].device),
        like=shared["q_ptr"],
        max_seqlen=shared["longest"],
        dropout=shared["threshold"] > 0,
    )
    blocks = triton.cdiv(shared["longest"], launch["BLOCK"])
    taken = {**shared, **own, "blocks": blocks}
    return {key: taken[key] for key in KERNELS[name].arg_names if key in taken} | launch


def _run_in_blocks(name: str, shared: dict, heads: int, **own: Any) -> None:
    """Run a kernel that has a program for each block of a sequence and head."""
    arguments = _prepare(name, shared, **own)
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    run(KERNELS[name], (arguments["blocks"] * batch, heads), **arguments)


def disentangled_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments
) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). arguments: those of the op's schema after v."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if q.shape[0]:
        shared = _arguments(q, k, v, *arguments)
        _run_in_blocks("forward", shared, q.shape[1], out_ptr=out, lse_ptr=lse)
    return out, lse


def disentangled_attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dqkv, dposition_keys, dposition_queries, dbias). rest: the arguments of the op's schema after v."""
    *arguments, wants_bias = rest
    tables, slots = arguments[:2], arguments[2]
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    dtables = [q.new_empty(0) if table is None else torch.zeros_like(table) for table in tables]
    if q.shape[0]:
        shared = _arguments(q, k, v, *arguments)
        shared |= {"dout_ptr": dout.contiguous(), "record_ptr": new_record(lse)}
        _run_in_blocks("record", shared, q.shape[1], out_ptr=out, lse_ptr=lse)
        sums = _head_gradients(shared, dqkv)
        for number, table in enumerate(tables):
            if table is not None:
                dtables[number] = table_gradient(sums[number], table, slots, descending=number == 1)
    dbias = column_sum(dqkv.flatten(1)) if wants_bias else q.new_empty(0, dtype=torch.float32)
    return dqkv, *dtables, dbias


def _head_gradients(shared: dict, dqkv: Tensor) -> list[Tensor | None]:
    """Fills dqkv. Returns for each table the sums (chunks, distances, H, D) by ``backward_tables``, or None."""
    q, k, heads = shared["q_ptr"], shared["k_ptr"], shared["H"]
    keys, queries = shared["position_keys_ptr"], shared["position_queries_ptr"]
    dq, dk, dv = dqkv.unbind(1)
    workspace = new_workspace(q, shared["longest"], keys is not None, queries is not None)
    by_pair, by_query, by_key = workspace.by_pair, workspace.by_query, workspace.by_key
    shared |= workspace.strides
    scale = shared["scale"] * shared["drop_scale"]
    sums: list[dict | None] = [
        _sums_arguments(shared, by_query, q, scale),
        _sums_arguments(shared, by_key, k, scale),
    ]
    for first_head in range(0, heads, workspace.heads):
        count = min(workspace.heads, heads - first_head)
        shared["first_head"] = first_head
        _run_in_blocks(
            "backward", shared, count, dv_ptr=dv, stride_dv=dv.stride(0), by_pair_ptr=by_pair,
            by_query_ptr=by_query, by_key_ptr=by_key,
        )  # fmt: skip
        for grad, other, by_distance, table, sign in (
            (dq, k, by_query, keys, 1),
            (dk, q, by_key, queries, -1),
        ):
            _run_in_blocks(
                "backward_rows", {**shared, "scale": scale}, count, grad_ptr=grad,
                stride_grad=grad.stride(0), by_pair_ptr=by_pair, other_ptr=other,
                by_distance_ptr=by_distance, position_ptr=table, SIGN=sign,
            )  # fmt: skip
        for arguments in sums:
            if arguments is not None:
                chunks, rows_count = arguments["partial_ptr"].shape[:2]
                grid = (rows_count // arguments["BLOCK"], chunks, count)
                run(KERNELS["backward_tables"], grid, **{**arguments, "first_head": first_head})
    return [arguments and arguments["partial_ptr"] for arguments in sums]


def _sums_arguments(
    shared: dict, by_distance: Tensor | None, own: Tensor, scale: float
) -> dict | None:
    """The arguments of ``backward_tables`` but the first head, or None without such a table."""
    if by_distance is None:
        return None
    batch = shared["cu_seqlens_ptr"].shape[0] - 1
    arguments = _prepare(
        "backward_tables", {**shared, "scale": scale}, by_distance_ptr=by_distance, own_ptr=own,
        partial_ptr=None, batch=batch, first_head=0,
    )  # fmt: skip
    distances = 2 * arguments["blocks"] * arguments["BLOCK"]
    heads, head_dim = own.shape[1:]
    chunks = min(batch, max(1, SUMS // (2 * arguments["blocks"] * heads)))
    arguments["partial_ptr"] = own.new_empty(
        (chunks, distances, heads, head_dim), dtype=torch.float32
    )
    return arguments
