"""Rotary position embedding of packed sequences, in plain torch.

Source: Su et al. 2021, arXiv:2104.09864; pairs are (d, d + rotary_dim / 2), as in transformers' rotate_half.
"""

import torch
from torch import Tensor


def rotary(x: Tensor, table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x (tokens, heads, head_dim) rotated, in its dtype; table (positions, rotary_dim): cosines, then sines."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1
    angles = table.to(wide)[tokens - cu_seqlens[sequence]]
    half = table.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    first, second, rest = x.to(wide).split([half, half, x.shape[2] - 2 * half], -1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, -1).to(x.dtype)
