"""Attention over a window and global tokens in plain torch, on a padded batch.

Source: Beltagy et al. 2020, arXiv:2004.05150 (Longformer).
"""

import torch
from torch import Tensor

from fastenc.reference.attention import attention, longest, pad, padded_rows
from fastenc.reference.dropout import dropout_scales


def global_window_attention(
    qkv: Tensor,
    global_q: Tensor,
    global_kv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    global_tokens: Tensor,
    cu_globals: Tensor,
    *,
    window_size: tuple[int, int],
    softmax_scale: float,
    dropout_p: float = 0.0,
    rng_states: tuple[Tensor, ...] = (),
) -> Tensor:
    """(tokens, num_heads, head_dim); arguments as in fastenc.ops.

    Args:
        cu_globals: int32 (batch+1,), the sequences' offsets among the global tokens.
        rng_states: the masks' states for keys in the window, for global keys, and for global queries.
    """
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).unbind(1)
    length = longest(cu_seqlens, max_seqlen, len(q))
    globals_at_most = longest(cu_globals, length, len(global_tokens))
    rows, exists = padded_rows(cu_seqlens, length)
    columns, is_column = padded_rows(cu_globals, globals_at_most)
    # (batch, num_heads, length, head_dim): all tokens, then the global ones again.
    queries = pad(q, rows, exists).transpose(1, 2)
    keys, values = (
        torch.cat([pad(x, rows, exists), pad(x[global_tokens], columns, is_column)], 1).transpose(
            1, 2
        )
        for x in (k, v)
    )
    is_global = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    is_global = pad(is_global.index_fill(0, global_tokens, True), rows, exists)
    distance = (
        torch.arange(length, device=q.device) - torch.arange(length, device=q.device)[:, None]
    )
    left, right = (n if n >= 0 else length for n in window_size)
    near = (distance >= -left) & (distance <= right)
    visible = torch.cat(
        [
            near & (exists & ~is_global)[:, None],
            is_column[:, None].expand(-1, length, -1),
        ],
        2,
    )
    scores = softmax_scale * queries @ keys.transpose(2, 3)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    # A row of padding sees no key.
    sees_none = ~visible.any(2)[:, None, :, None]
    probabilities = scores.masked_fill(sees_none, 0).softmax(3).masked_fill(sees_none, 0)
    if dropout_p > 0:
        streams = torch.arange(q.shape[1], device=q.device)[:, None]
        kept = [
            dropout_scales(state, streams, rows[:, None], count, dropout_p)
            for state, count in zip(rng_states, (length, globals_at_most), strict=False)
        ]
        probabilities = probabilities * torch.cat(kept, 3).to(wide)
    local = (probabilities @ values).transpose(1, 2)
    token = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    out = local[sequence, token - cu_seqlens[sequence]]
    global_k, global_v = global_kv.to(wide).unbind(1)
    of_globals, _ = attention(
        global_q.to(wide),
        global_k,
        global_v,
        cu_globals,
        cu_seqlens,
        globals_at_most,
        length,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        rng_state=rng_states[2] if dropout_p > 0 else None,
    )
    return out.index_copy(0, global_tokens, of_globals).to(qkv.dtype)
