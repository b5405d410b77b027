"""Attention whose scores also compare content with relative positions (DeBERTa)."""

from typing import Any

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, sequences
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare, head_limits
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import disentangled_attention as reference

OP = "disentangled_attention"
declare(OP, "cpp", "triton")


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
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 64) or "reference".
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. On a GPU, products of float32 are in TF32 if torch.backends.cuda.matmul allows it.
        Deterministic: yes; no result depends on the number of threads.
    Memory: C++ and Triton's forward keep nothing of size length x length. Both keep the tables with a row for each
        distance up to the longest sequence. C++'s backward has up to 32 sums of the tables' gradients, each of
        2 * length - 1 rows of one head. Triton's backward keeps the gradients of the scores of as many heads as fit
        into 256 MiB, of one at least: three numbers in qkv's dtype for each token and position in the longest sequence.
        It also has sums of the tables' gradients over groups of sequences, of about 2,048 blocks of 64 distances.
    Differentiable: qkv, position_keys, position_queries.
    Source: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543 (one table of slots for both terms).
    """
    checks.check_qkv(OP, qkv)
    checks.check_device(OP, "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    checks.check_dropout(OP, dropout_p)
    rows = _check_tables(qkv, position_keys, position_queries)
    _check_slots(slots, qkv, rows)
    if softmax_scale is None:
        terms = 1 + (position_keys is not None) + (position_queries is not None)
        softmax_scale = (qkv.shape[3] * terms) ** -0.5
    rng_state = checks.mask_rng_state(OP, rng_state, dropout_p, qkv)
    q, k, v = qkv.unbind(1)
    tensors = (position_keys, position_queries, slots, cu_seqlens, rng_state)
    numbers = (max_seqlen, dropout_p, softmax_scale)
    if choose(OP, impl, qkv, **head_limits(qkv.shape[3], widest_triton=64)) == "reference":
        out, _ = reference.disentangled_attention(
            q,
            k,
            v,
            *tensors[:4],
            max_seqlen,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            rng_state=rng_state,
        )
        return out
    given = (qkv, position_keys, position_queries)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return _DisentangledAttention.apply(qkv, *tensors, *numbers)
    return torch.ops.fastenc.disentangled_attention_fwd(q, k, v, *tensors, *numbers)[0]


class _DisentangledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, *arguments):
        out, lse = torch.ops.fastenc.disentangled_attention_fwd(*qkv.unbind(1), *arguments)
        # The backward computes the probabilities again.
        ctx.save_for_backward(out, lse, qkv, *arguments[:TENSORS])
        ctx.numbers = arguments[TENSORS:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        out, lse, qkv, *tensors = ctx.saved_tensors
        dqkv, dkeys, dqueries, _ = torch.ops.fastenc.disentangled_attention_bwd(
            dout, out, lse, *qkv.unbind(1), *tensors, *ctx.numbers, False
        )
        keys, queries = tensors[:2]
        return (
            dqkv,
            None if keys is None else dkeys,
            None if queries is None else dqueries,
            *(None,) * (TENSORS + len(ctx.numbers) - 2),
        )


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
        checks.check_device(OP, name, table, qkv)
        rows = table.shape[0]
    return rows


def _check_slots(slots: Tensor, qkv: Tensor, rows: int | None) -> None:
    if slots.dtype != torch.int32 or slots.dim() != 1 or slots.shape[0] % 2 != 1:
        raise ValueError(
            f"{OP}: slots must be int32 of shape (2 * R + 1,), a row for each distance from -R to R, got {slots.dtype} "
            f"of shape {tuple(slots.shape)}"
        )
    checks.check_device(OP, "slots", slots, qkv)
    if rows is None or slots.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in slots.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(
            f"{OP}: slots must be in [0, {rows}), the rows of the tables, got {low if low < 0 else high}"
        )


TENSORS = 5
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? position_keys, Tensor? position_queries, Tensor slots, Tensor cu_seqlens, "
    "Tensor? rng_state, SymInt max_seqlen, float dropout_p, float scale"
)


def _fake_forward(q, *arguments):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_backward(dout, out, lse, q, k, v, position_keys, position_queries, *rest):
    tables = (position_keys, position_queries)
    return (
        q.new_empty((q.shape[0], 3, *q.shape[1:])),
        *(q.new_empty(0 if table is None else table.shape) for table in tables),
        q.new_empty(3 * q.shape[1] * q.shape[2] if rest[-1] else 0, dtype=torch.float32),
    )


define(
    f"disentangled_attention_fwd({_CALL}) -> (Tensor out, Tensor lse)",
    _fake_forward,
    triton="disentangled_attention.disentangled_attention_forward",
)
# wants_bias: return the gradient of the projection's bias too, the sum of dqkv over the tokens, float32
# (3 * num_heads * head_dim,).
define(
    f"disentangled_attention_bwd(Tensor dout, Tensor out, Tensor lse, {_CALL}, bool wants_bias) -> (Tensor dqkv, "
    "Tensor dposition_keys, Tensor dposition_queries, Tensor dbias)",
    _fake_backward,
    triton="disentangled_attention.disentangled_attention_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    rows, reach = draw.choice(32, 1, 9), draw.choice(40, 0, 3, 100)
    tables = [draw.normal(rows, size.heads, size.head_dim) for _ in range(2)]
    return {
        "qkv": draw.normal(size.tokens, 3, size.heads, size.head_dim),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
        "slots": draw.integers(rows, 2 * reach + 1, dtype=torch.int32),
        "position_keys": draw.choice(tables[0], None),
        "position_queries": draw.choice(tables[1], None),
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        "softmax_scale": draw.choice(None, 0.3),
    }


def _plain(
    qkv, cu_seqlens, max_seqlen, slots, position_keys, position_queries, dropout_p, softmax_scale
) -> Tensor:
    """A sequence at a time, as DeBERTa's own code computes: products with all rows, from which scores are gathered."""
    outputs, reach, scale = [], slots.shape[0] // 2, (qkv.shape[3] * 3) ** -0.5
    for part in sequences(qkv, cu_seqlens):
        q, k, v = part.permute(1, 2, 0, 3).unbind(0)  # each (num_heads, length, head_dim)
        position = torch.arange(len(part), device=qkv.device)
        distance = (position - position[:, None]).clamp(-reach, reach)
        row = slots[distance + reach].long().expand(len(q), -1, -1)
        by_query = (q @ position_keys.permute(1, 2, 0)).gather(2, row)
        by_key = (k @ position_queries.permute(1, 2, 0)).gather(2, row.mT).mT
        scores = scale * (q @ k.mT + by_query + by_key)
        outputs.append((scores.softmax(2) @ v).transpose(0, 1))
    return torch.cat(outputs)


declare_case(disentangled_attention, _case_inputs, _plain)
