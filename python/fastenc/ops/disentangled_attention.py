"""Attention whose scores also compare content with relative positions (DeBERTa)."""

import torch
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._dispatch import choose, declare
from fastenc.packing import check_cu_seqlens
from fastenc.reference import disentangled_attention as reference

OP = "disentangled_attention"
declare(OP)


def disentangled_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    slots: Tensor,
    *,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    rng_state: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Non-causal attention inside each sequence of a packed batch, with projected relative positions in the scores.

        s[i, j] = softmax_scale * (q[i] . k[j] + q[i] . position_keys[t] + k[j] . position_queries[t])
        t = slots[R + clamp(j - i, -R, R)]
        out[i] = sum_j dropout(softmax_j(s[i, j])) v[j]

    A term without a table is left out.

    Args:
        qkv: (total_tokens, 3, num_heads, head_dim), floating point. It is read in place if its last stride is 1.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        slots: int32 (2 * R + 1,), the row of the tables for each distance key - query from -R to R. On a GPU its values
            are not checked, because that would wait for the device.
        position_keys, position_queries: (rows, num_heads, head_dim), dtype of qkv, or None.
        dropout_p: probability of dropping a softmax weight, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation.
        softmax_scale: (head_dim * number of terms) ** -0.5 if None.
        rng_state: int64 (2,), seed and offset of dropout's mask, on qkv's device; the same state gives the mask of
            :func:`attention`. None: random, from the device's default generator.
        impl: "auto" or "reference".
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. Deterministic: yes.
    Differentiable: qkv, position_keys, position_queries.
    Source: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543 (one table of slots for both terms).
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_floating_point():
        raise ValueError(
            f"{OP}: qkv must be floating point of shape (total_tokens, 3, num_heads, head_dim), "
            f"got {qkv.dtype} of shape {tuple(qkv.shape)}: view the fused projection's output that way"
        )
    _checks.check_device(OP, "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    _checks.check_dropout(OP, dropout_p)
    rows = _check_tables(qkv, position_keys, position_queries)
    _check_slots(slots, qkv, rows)
    if softmax_scale is None:
        terms = 1 + (position_keys is not None) + (position_queries is not None)
        softmax_scale = (qkv.shape[3] * terms) ** -0.5
    rng_state = _checks.mask_rng_state(OP, rng_state, dropout_p, qkv)
    choose(OP, impl, qkv)
    q, k, v = qkv.unbind(1)
    out, _ = reference.disentangled_attention(
        q,
        k,
        v,
        position_keys,
        position_queries,
        slots,
        cu_seqlens,
        max_seqlen,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )
    return out


def _check_tables(qkv: Tensor, keys: Tensor | None, queries: Tensor | None) -> int | None:
    """The number of rows of the tables, or None without any."""
    rows = None
    for name, table in (("position_keys", keys), ("position_queries", queries)):
        if table is None:
            continue
        if table.dim() != 3 or table.shape[1:] != qkv.shape[2:] or table.dtype != qkv.dtype:
            raise ValueError(
                f"{OP}: {name} must have shape (rows, {qkv.shape[2]}, {qkv.shape[3]}) and qkv's dtype {qkv.dtype}, "
                f"got {table.dtype} of shape {tuple(table.shape)}"
            )
        if rows not in (None, table.shape[0]):
            raise ValueError(
                f"{OP}: position_keys and position_queries must have as many rows, got {rows} and {table.shape[0]}"
            )
        _checks.check_device(OP, name, table, qkv)
        rows = table.shape[0]
    return rows


def _check_slots(slots: Tensor, qkv: Tensor, rows: int | None) -> None:
    if slots.dtype != torch.int32 or slots.dim() != 1 or slots.shape[0] % 2 != 1:
        raise ValueError(
            f"{OP}: slots must be int32 of shape (2 * R + 1,), a row for each distance from -R to R, got {slots.dtype} "
            f"of shape {tuple(slots.shape)}"
        )
    _checks.check_device(OP, "slots", slots, qkv)
    if rows is None or slots.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in slots.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(
            f"{OP}: slots must be in [0, {rows}), the rows of the tables, got {low if low < 0 else high}"
        )
