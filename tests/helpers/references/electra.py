"""Replaced-token detection in plain torch.

Source: Clark et al. 2020, arXiv:2003.10555, section 2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sample(logits: Tensor, draws: Tensor) -> Tensor:
    """Token j of each row with sum_{i<j} p_i <= draw < sum_{i<=j} p_i, p = softmax(logits).

    Args: logits (rows, vocabulary); draws (rows,), uniform in [0, 1).
    """
    cumulative = torch.softmax(logits.double(), dim=1).cumsum(1)
    passed = cumulative <= draws[:, None] * cumulative[:, -1:]
    return passed.sum(1).clamp(max=logits.shape[1] - 1)


def electra_loss(
    generator_logits: Tensor,
    labels: Tensor,
    discriminator_logits: Tensor,
    replaced: Tensor,
    weight: float = 50.0,
) -> Tensor:
    """Masked-LM loss of the generator + weight × the discriminator's over all tokens.

    Args: generator_logits (tokens, vocabulary), labels (tokens,), -100 where there is nothing to predict,
        discriminator_logits (tokens,), replaced (tokens,), true where the token is not the original one.
    """
    detection = F.binary_cross_entropy_with_logits(
        discriminator_logits, replaced.to(discriminator_logits.dtype)
    )
    return F.cross_entropy(generator_logits, labels) + weight * detection
