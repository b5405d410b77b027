"""Attention in which a block of queries sees some blocks of keys, in plain torch on a padded batch.

Source: Zaheer et al. 2020, arXiv:2007.14062 (BigBird).
"""

import torch
from torch import Tensor

from fastenc.reference.attention import longest, pad, padded_rows, weighted_values


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    columns: Tensor,
    counts: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    block_size: int,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """(out (tokens, num_heads, head_dim), softmax_lse (num_heads, tokens)); arguments as in fastenc.ops."""
    wide = torch.promote_types(q.dtype, torch.float32)
    length = longest(cu_seqlens, max_seqlen, q.shape[0])
    rows, exists = padded_rows(cu_seqlens, length)
    # (batch, num_heads, length, head_dim)
    q_rows, k_rows, v_rows = (pad(x.to(wide), rows, exists).transpose(1, 2) for x in (q, k, v))
    seen = _counts_of_blocks(starts, columns, counts, cu_seqlens, q.shape[0], length, block_size)
    for dim in (2, 3):
        seen = seen.repeat_interleave(block_size, dim).narrow(dim, 0, length)
    scores = softmax_scale * (q_rows @ k_rows.transpose(2, 3)) + seen.to(wide).log()
    scores = scores.masked_fill(~exists[:, None, None, :], float("-inf"))
    out, lse = weighted_values(
        scores, v_rows, rows, cu_seqlens, q.shape[0], dropout_p=0.0, rng_state=None
    )
    return out.to(q.dtype), lse


def _counts_of_blocks(
    starts: Tensor,
    columns: Tensor,
    counts: Tensor,
    cu_seqlens: Tensor,
    tokens: int,
    length: int,
    block_size: int,
) -> Tensor:
    """(batch, plans, blocks, blocks): how often the plan names a block of keys for a block of queries."""
    batch, blocks = len(cu_seqlens) - 1, -(-length // block_size)
    rows = tokens // block_size + batch
    plans = (len(starts) - 1) // rows if rows else 1
    # Entries that no row has belong to a last row, which is left out.
    entry = torch.arange(len(columns), device=columns.device, dtype=starts.dtype)
    row = torch.searchsorted(starts[1:].contiguous(), entry, right=True)
    table = counts.new_zeros(plans * rows + 1, max(1, blocks))
    table.index_put_((row, columns.clamp(0, max(1, blocks) - 1)), counts, accumulate=True)
    block = torch.arange(blocks, device=columns.device)
    first = cu_seqlens[:-1] // block_size + torch.arange(batch, device=columns.device)
    exists = block * block_size < cu_seqlens.diff()[:, None]
    index = torch.where(exists, first[:, None] + block, 0)
    of_plans = table[:-1].view(plans, rows, max(1, blocks))[:, index] * exists[:, :, None]
    return of_plans.transpose(0, 1)[..., :blocks]
