"""Softmax cross-entropy over the labelled rows, in plain torch.

Source: label smoothing, Szegedy et al. 2016, arXiv:1512.00567; z-loss, Chowdhery et al. 2022, arXiv:2204.02311.
"""

import torch
from torch import Tensor

IGNORED = -100  # the label that losses ignore, as torch.nn.functional.cross_entropy does


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = (labels != ignore_index).nonzero().flatten()
    selected = logits[rows].to(wide)
    lse = torch.logsumexp(selected, dim=1)
    losses = lse - selected.gather(1, labels[rows, None])[:, 0]
    if label_smoothing > 0:
        uniform = lse - selected.mean(1)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    losses = losses + z_loss * lse.square()
    if reduction == "none":
        return losses.new_zeros(labels.shape).index_copy(0, rows, losses)
    return losses.sum() / (max(rows.numel(), 1) if reduction == "mean" else 1)


def linear_masked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return masked_cross_entropy(logits, labels, **options)
