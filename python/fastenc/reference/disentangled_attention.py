"""Attention whose scores also compare content with relative positions, in plain torch on a padded batch.

Source: He et al. 2020, arXiv:2006.03654 (DeBERTa).
"""

import torch
from torch import Tensor

from fastenc.reference.attention import longest, pad, padded_rows, weighted_values


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    slots: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (tokens, num_heads, head_dim), softmax_lse (num_heads, tokens)); arguments as in fastenc.ops."""
    wide = torch.promote_types(q.dtype, torch.float32)
    length = longest(cu_seqlens, max_seqlen, q.shape[0])
    rows, exists = padded_rows(cu_seqlens, length)
    # (batch, num_heads, length, head_dim)
    q_rows, k_rows, v_rows = (pad(x.to(wide), rows, exists).transpose(1, 2) for x in (q, k, v))
    scores = q_rows @ k_rows.transpose(2, 3)
    position, reach = torch.arange(length, device=q.device), slots.shape[0] // 2
    distance = position - position[:, None]  # (query, key)
    slot = slots.long()[distance.clamp(-reach, reach) + reach].expand_as(scores)
    if position_keys is not None:
        by_slot = q_rows @ position_keys.to(wide).permute(1, 2, 0)
        scores = scores + by_slot.gather(3, slot)
    if position_queries is not None:
        by_slot = k_rows @ position_queries.to(wide).permute(1, 2, 0)  # (batch, head, key, slot)
        scores = scores + by_slot.gather(3, slot.transpose(2, 3)).transpose(2, 3)
    scores = (softmax_scale * scores).masked_fill(~exists[:, None, None, :], float("-inf"))
    out, lse = weighted_values(
        scores, v_rows, rows, cu_seqlens, q.shape[0], dropout_p=dropout_p, rng_state=rng_state
    )
    return out.to(q.dtype), lse
