"""The span-boundary objective in plain torch.

Source: Joshi et al. 2019, arXiv:1907.10529, section 3.2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def span_boundary_logits(
    hidden: Tensor,
    spans: Tensor,
    positions: Tensor,
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    embeddings: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """LN(gelu(W2 LN(gelu(W1 [x_{s-1}; x_{e+1}; p_{i-s+1}] + b1)) + b2)) E^T + bias for token i of span (s, e).

    Args:
        hidden: (tokens, hidden_size).
        spans: int64 (predicted, 4): i, s - 1, e + 1, i - s.
        positions: (places, width), p.
        layers: weight, bias, LayerNorm weight, LayerNorm bias of both layers.
        embeddings: (vocabulary, embedding_size), E; bias: (vocabulary,).
    """
    _, left, right, index = spans.unbind(1)
    h = torch.cat([hidden[left], hidden[right], positions[index]], dim=1)
    for weight, own_bias, norm_weight, norm_bias in layers:
        h = F.gelu(F.linear(h, weight, own_bias))
        h = F.layer_norm(h, h.shape[1:], norm_weight, norm_bias, eps)
    return F.linear(h, embeddings, bias)
