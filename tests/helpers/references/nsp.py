"""The loss of BERT's pretraining in plain torch.

Source: Devlin et al. 2018, arXiv:1810.04805.
"""

import torch.nn.functional as F
from torch import Tensor


def pretraining_loss(
    logits: Tensor, labels: Tensor, pair_logits: Tensor, pair_labels: Tensor
) -> Tensor:
    """Mean over the labelled tokens (labels other than -100) plus mean over the pairs.

    Args: logits (tokens, vocabulary), labels (tokens,), pair_logits (pairs, 2), pair_labels (pairs,).
    """
    return F.cross_entropy(logits, labels) + F.cross_entropy(pair_logits, pair_labels)
