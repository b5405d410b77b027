"""Non-causal attention inside each sequence of a packed batch, in plain torch.

Source: Vaswani et al. 2017, arXiv:1706.03762.
"""

import torch
from torch import Tensor

from fastenc.reference.dropout import dropout_scales


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    num_heads, head_dim = qkv.shape[2:]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    offsets = cu_seqlens.tolist()
    outputs = [qkv.new_empty((0, num_heads, head_dim))]
    for start, end in zip(offsets, offsets[1:], strict=False):
        q, k, v = qkv[start:end].to(wide).permute(1, 2, 0, 3)  # each (num_heads, length, head_dim)
        probabilities = torch.softmax(scale * q @ k.transpose(1, 2), dim=-1)
        if dropout_p > 0:
            heads = torch.arange(num_heads, device=qkv.device)[:, None]
            rows = torch.arange(start, end, device=qkv.device)[None, :]
            assert seed is not None
            scales = dropout_scales(int(seed), heads, rows, end - start, dropout_p)
            probabilities = probabilities * scales.to(wide)
        outputs.append((probabilities @ v).transpose(0, 1).to(qkv.dtype))
    return torch.cat(outputs)
