"""Non-causal attention inside each sequence of a packed batch, in plain torch.

It pads the sequences and computes in the padded batch, so nothing is read back from the device.
Source: Vaswani et al. 2017, arXiv:1706.03762; Press et al. 2021 (ALiBi), arXiv:2108.12409.
"""

import torch
from torch import Tensor

from fastenc.reference.dropout import dropout_scales


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (total_q, num_heads, head_dim), softmax_lse (num_heads, total_q)); arguments as in fastenc.ops.attention."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1]
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    max_seqlen_q = _longest(cu_seqlens_q, max_seqlen_q, q.shape[0])
    max_seqlen_k = _longest(cu_seqlens_k, max_seqlen_k, k.shape[0])
    rows, row_exists = _padded_rows(cu_seqlens_q, max_seqlen_q)
    columns, column_exists = _padded_rows(cu_seqlens_k, max_seqlen_k)
    # (batch, num_heads, length, head_dim)
    q_rows, k_rows, v_rows = (
        _pad(x.to(wide), rows_of_x, exists).transpose(1, 2)
        for x, rows_of_x, exists in (
            (q, rows, row_exists),
            (k, columns, column_exists),
            (v, columns, column_exists),
        )
    )
    scores = scale * q_rows @ k_rows.transpose(2, 3)

    # Queries and keys end at the same position: query i has the position of key i + length_k - length_q.
    shift = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    i = torch.arange(max_seqlen_q, device=q.device)[:, None] + shift[:, None, None]
    distance = torch.arange(max_seqlen_k, device=q.device) - i  # (batch, query, key)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(wide)[:, None, None] * distance.abs()[:, None]
    if relative_bias is not None:
        span = relative_bias.shape[1] // 2
        table = relative_bias.to(wide)[:, distance.clamp(-span, span) + span]
        scores = scores + table.transpose(0, 1)
    if key_bias is not None:
        scores = scores + _pad(key_bias.to(wide), columns, column_exists)[:, None, None]
    visible = column_exists[:, None, :].expand_as(distance)
    left, right = window_size
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))

    # A query that sees no key gets 0, and a gradient of 0.
    sees_none = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(sees_none, 0)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(sees_none, 0)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True).masked_fill(sees_none, float("-inf"))
    if dropout_p > 0:
        streams = torch.arange(heads, device=q.device)[:, None]
        assert rng_state is not None
        scales = dropout_scales(rng_state, streams, rows[:, None], max_seqlen_k, dropout_p)
        probabilities = probabilities * scales.to(wide)
    out = probabilities @ v_rows

    tokens = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q.contiguous(), tokens, right=True) - 1
    position = tokens - cu_seqlens_q[sequence]
    out, lse = (x.transpose(1, 2)[sequence, position] for x in (out, lse))
    return out.to(q.dtype), lse[..., 0].transpose(0, 1)


def _longest(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> int:
    """The length to pad to. max_seqlen may be any upper bound, and time and memory grow with the length's square."""
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return min(max_seqlen, tokens)  # reading the offsets would wait for the device


def _padded_rows(cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """(packed row of each position of the padded batch, whether it is a token), both (batch, max_seqlen)."""
    position = torch.arange(max_seqlen, device=cu_seqlens.device)
    return cu_seqlens[:-1, None] + position, position < cu_seqlens.diff()[:, None]


def _pad(x: Tensor, rows: Tensor, exists: Tensor) -> Tensor:
    """x (tokens, ...) padded to (batch, max_seqlen, ...), with zeros where ``exists`` is false."""
    zero = x.new_zeros((1, *x.shape[1:]))
    return torch.cat([x, zero])[torch.where(exists, rows, x.shape[0])]
