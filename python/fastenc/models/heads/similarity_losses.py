"""Losses over the similarities of texts' vectors."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import dispatch, masked_cross_entropy


def ranking_loss(
    vectors: Tensor,
    text_ids: Tensor,
    *,
    scale: float = 20.0,
    symmetric: bool = False,
    normalize: bool = True,
) -> Tensor:
    """Multiple-negatives ranking loss: a cross-entropy that selects each text's partner among the batch's candidates.

        loss_i = -log( exp(s_i,i) / sum_j exp(s_i,j) ),   s_i,j = scale · cos(text_i, candidate_j)

    The candidates are all partners, followed by all hard negatives. Candidates that are no negatives of a text are left
    out of its sum: those equal to the text or to its partner, and partners of an equal text.

    Args:
        vectors: (pairs, 2, hidden_size), texts and partners, or (pairs, 3, hidden_size) with hard negatives.
        text_ids: int64 (pairs, 2 or 3), equal numbers for equal texts.
        scale: factor of the similarities.
        symmetric: also select each partner's text among the texts; the loss is the mean of both directions.
        normalize: False: dot products in place of cosines.
    Returns: float32 scalar, the mean over pairs.
    Raises: ValueError for other shapes.
    Source: Henderson et al. 2017, arXiv:1705.00652; hard negatives as in Gao et al. 2021, arXiv:2104.08821; both
        directions as in Radford et al. 2021, arXiv:2103.00020.
    """
    if vectors.dim() != 3 or vectors.shape[1] not in (2, 3) or text_ids.shape != vectors.shape[:2]:
        raise ValueError(
            "ranking_loss needs vectors (pairs, 2 or 3, hidden_size) and text_ids of the first two sizes, got "
            f"{tuple(vectors.shape)} and {tuple(text_ids.shape)}"
        )
    pairs = vectors.shape[0]
    row = torch.arange(pairs, device=vectors.device)
    texts, partners, *_ = text_ids.unbind(1)
    candidates = text_ids[:, 1:].T.flatten()
    left_out = (candidates == texts[:, None]) | (candidates == partners[:, None])
    same = F.pad(texts == texts[:, None], (0, len(candidates) - pairs))
    itself = row[:, None] == torch.arange(len(candidates), device=row.device)
    # Half precision would round away the small differences between similar texts.
    with _without_autocast(vectors.device.type):
        unit = F.normalize(vectors.float(), dim=2) if normalize else vectors.float()
        scores = scale * unit[:, 0] @ unit[:, 1:].transpose(0, 1).flatten(0, 1).T
    scores = scores.masked_fill((left_out | same) & ~itself, float("-inf"))
    loss = masked_cross_entropy(scores, row)
    if not symmetric:
        return loss
    return (loss + masked_cross_entropy(scores[:, :pairs].T, row)) / 2


def cosent_loss(similarities: Tensor, scores: Tensor, *, scale: float = 20.0) -> Tensor:
    """CoSENT: of any two pairs, the one with the higher score should have the higher cosine similarity.

        loss = log(1 + sum over (i, j) with score_i > score_j of exp(scale · (similarity_j - similarity_i)))

    Args:
        similarities: (pairs,), cosine similarities.
        scores: (pairs,), the labels.
    Returns: float32 scalar for the whole batch; it is not a mean.
    Source: Huang et al. 2024, doi:10.1109/TASLP.2024.3402087.
    """
    scaled = scale * similarities.float()
    differences = scaled[None, :] - scaled[:, None]
    counted = differences.masked_fill(scores[:, None] <= scores[None, :], float("-inf"))
    return torch.cat([scaled.new_zeros(1), counted.flatten()]).logsumexp(0)


def flops_loss(weights: Tensor) -> Tensor:
    """FLOPS regulariser: how many products a search in an inverted index takes, made smooth.

        loss = sum_v (mean_i weights[i, v])^2

    Args:
        weights: (texts, vocabulary), at least 0.
    Returns: float32 scalar.
    Source: Paria et al. 2020, arXiv:2004.05665.
    """
    return weights.float().mean(0).square().sum()


def _without_autocast(device_type: str) -> AbstractContextManager:
    if dispatch.autocast_dtype(device_type) is None:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
