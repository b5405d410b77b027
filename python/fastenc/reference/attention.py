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
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    max_seqlen_q = longest(cu_seqlens_q, max_seqlen_q, q.shape[0])
    max_seqlen_k = longest(cu_seqlens_k, max_seqlen_k, k.shape[0])
    rows, row_exists = padded_rows(cu_seqlens_q, max_seqlen_q)
    columns, column_exists = padded_rows(cu_seqlens_k, max_seqlen_k)
    # (batch, num_heads, length, head_dim)
    q_rows, k_rows, v_rows = (
        pad(x.to(wide), rows_of_x, exists).transpose(1, 2)
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
        scores = scores + pad(key_bias.to(wide), columns, column_exists)[:, None, None]
    visible = column_exists[:, None, :].expand_as(distance)
    left, right = window_size
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))

    out, lse = weighted_values(
        scores, v_rows, rows, cu_seqlens_q, q.shape[0], dropout_p=dropout_p, rng_state=rng_state
    )
    return out.to(q.dtype), lse


def weighted_values(
    scores: Tensor,
    v_rows: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    tokens: int,
    *,
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scores)) v of a padded batch, packed.

    Args:
        scores: (batch, num_heads, queries, keys), -inf where a query does not see a key.
        v_rows: (batch, num_heads, keys, head_dim).
        rows: (batch, queries), the packed row of each query.
        cu_seqlens, tokens: the queries' offsets and number.
    Returns: (tokens, num_heads, head_dim), and softmax_lse (num_heads, tokens).
    """
    # A query that sees no key gets 0, and a gradient of 0.
    sees_none = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(sees_none, 0)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(sees_none, 0)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True).masked_fill(sees_none, float("-inf"))
    if dropout_p > 0:
        streams = torch.arange(scores.shape[1], device=scores.device)[:, None]
        assert rng_state is not None
        scales = dropout_scales(rng_state, streams, rows[:, None], scores.shape[3], dropout_p)
        probabilities = probabilities * scales.to(scores.dtype)
    out = probabilities @ v_rows

    token = torch.arange(tokens, device=scores.device)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    position = token - cu_seqlens[sequence]
    out, lse = (x.transpose(1, 2)[sequence, position] for x in (out, lse))
    return out, lse[..., 0].transpose(0, 1)


def longest(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> int:
    """The length to pad to. max_seqlen may be any upper bound, and time and memory grow with the length's square."""
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return min(max_seqlen, tokens)  # reading the offsets would wait for the device


def padded_rows(cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """(packed row of each position of the padded batch, whether it is a token), both (batch, max_seqlen)."""
    position = torch.arange(max_seqlen, device=cu_seqlens.device)
    return cu_seqlens[:-1, None] + position, position < cu_seqlens.diff()[:, None]


def pad(x: Tensor, rows: Tensor, exists: Tensor) -> Tensor:
    """x (tokens, ...) padded to (batch, max_seqlen, ...), with zeros where ``exists`` is false."""
    zero = x.new_zeros((1, *x.shape[1:]))
    return torch.cat([x, zero])[torch.where(exists, rows, x.shape[0])]
