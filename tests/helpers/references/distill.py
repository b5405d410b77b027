"""The loss of distilling a masked LM in plain torch.

Source: Sanh et al. 2019, arXiv:1910.01108, section 3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.reference.linear_kl_divergence import divergence


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    hidden: Tensor,
    teacher_hidden: Tensor,
    temperature: float = 2.0,
    weights: tuple[float, float, float] = (2.0, 5.0, 1.0),
) -> Tensor:
    """Weighted sum of the masked-LM loss, the KL divergence over the labelled tokens, and 1 - cosine over all tokens.

    Args: logits (tokens, vocabulary), labels (tokens,), -100 where there is nothing to predict, hidden
        (tokens, hidden_size): the last hidden states.
    """
    rows = labels != -100
    masked, kl, cosine = weights
    return (
        masked * F.cross_entropy(logits, labels)
        + kl * divergence(logits[rows], teacher_logits[rows], temperature)
        + cosine * (1 - torch.cosine_similarity(hidden, teacher_hidden)).mean()
    )
