"""Losses over the scores of queries' candidates.

In all of them scores and labels are (queries, candidates). A query with fewer candidates than others is filled up with
labels of -inf, and its scores there are not read.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = "margin-mse"  # the loss that reads a teacher's scores
NO_SCORE = -1e16  # the score of what fills up a row: finite, so that 0 times its logarithm is 0


def list_net(scores: Tensor, labels: Tensor) -> Tensor:
    """ListNet: cross-entropy between the softmax of the labels and the softmax of the scores, a mean over queries.

    Source: Cao et al. 2007, doi:10.1145/1273496.1273513.
    """
    return F.cross_entropy(_filled(scores, labels), labels.softmax(1))


def softmax_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """A softmax over a query's candidates that selects the relevant ones, a mean over queries that have some.

    loss = - sum_j y_j / (sum_k y_k) · log softmax(scores)_j,   y = max(labels, 0)
    """
    relevance = labels.clamp(min=0)
    total = relevance.sum(1, keepdim=True)
    losses = -(relevance / total.clamp(min=1e-12) * _filled(scores, labels).log_softmax(1)).sum(1)
    return losses.sum() / (total > 0).sum().clamp(min=1)


def margin_mse(scores: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of the margins: ((s_i - s_j) - (t_i - t_j))², a mean over the pairs with label_i > label_j.

    Args:
        teacher: (queries, candidates), the scores t of the teacher.
    Source: Hofstätter et al. 2020, arXiv:2010.02666.
    """
    counted = ordered_pairs(labels)
    errors = _filled(scores, labels) - _filled(teacher, labels)
    squares = (errors[:, :, None] - errors[:, None, :]).square()
    return squares.where(counted, 0).sum() / counted.sum().clamp(min=1)


def lambda_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """LambdaLoss with the weights of NDCG-Loss2++, a mean over the pairs with label_i > label_j.

        loss_ij = -(mu · |1/D(r) - 1/D(r+1)| + |1/D(i) - 1/D(j)|) · |G_i - G_j| · log2 sigmoid(s_i - s_j)

    where i and j are ranks by score, r = |i - j|, D(i) = log2(1 + i), G = (2^label - 1) / the best DCG, and mu = 10.
    Source: Wang et al. 2018, doi:10.1145/3269206.3271784.
    """
    ordered, order = _filled(scores, labels).sort(dim=1, descending=True)
    by_rank = labels.gather(1, order)
    counted = ordered_pairs(by_rank)
    ranks = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    discounts = (1 + ranks).log2()
    best = ((2 ** labels.sort(1, descending=True).values.clamp(min=0) - 1) / discounts).sum(1)
    gains = (2 ** by_rank.clamp(min=0) - 1) / best.clamp(min=1e-10)[:, None]
    distance = (ranks[:, None] - ranks).abs()
    # At a distance of 0, on the diagonal, no pair is counted.
    of_distance = (1 / discounts[distance - 1] - 1 / discounts[distance]).abs()
    of_ranks = (1 / discounts[:, None] - 1 / discounts).abs()
    weights = (10 * of_distance + of_ranks) * (gains[:, :, None] - gains[:, None, :]).abs()
    margins = (ordered[:, :, None] - ordered[:, None, :]).clamp(-1e8, 1e8)
    losses = weights * F.logsigmoid(margins) / math.log(2)
    return -losses.where(counted, 0).sum() / counted.sum().clamp(min=1)


def ordered_pairs(labels: Tensor) -> Tensor:
    """Whether candidate i has a higher label than candidate j: bool (queries, candidates i, candidates j)."""
    return (labels[:, :, None] > labels[:, None, :]) & labels.isfinite()[:, None, :]


def _filled(values: Tensor, labels: Tensor) -> Tensor:
    return values.float().masked_fill(~labels.isfinite(), NO_SCORE)


# By name: the loss of (scores, labels), and what it is a mean over, counted from the labels.
LIST_LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], int]]] = {
    "cross-entropy": (softmax_cross_entropy, lambda labels: int((labels > 0).any(1).sum())),
    "listnet": (list_net, len),
    "lambda": (lambda_loss, lambda labels: int(ordered_pairs(labels).sum())),
    MARGIN: (margin_mse, lambda labels: int(ordered_pairs(labels).sum())),
}
