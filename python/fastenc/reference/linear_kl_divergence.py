"""KL divergence between two models' distributions over the vocabulary, in plain torch.

Source: Hinton et al. 2015, arXiv:1503.02531.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    teacher_logits = F.linear(teacher_hidden, teacher_weight, teacher_bias)
    return divergence(logits, teacher_logits, temperature, mask)


def divergence(
    logits: Tensor, teacher_logits: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """Mean over the (masked) rows of T^2 KL(softmax(teacher_logits / T) || softmax(logits / T)), 0 without rows."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    student, teacher = ((x.to(wide) / temperature).log_softmax(1) for x in (logits, teacher_logits))
    rows = (teacher.exp() * (teacher - student)).sum(1)
    if mask is None:
        return temperature**2 * rows.sum() / max(rows.shape[0], 1)
    return temperature**2 * (rows * mask).sum() / mask.sum().clamp(min=1)
