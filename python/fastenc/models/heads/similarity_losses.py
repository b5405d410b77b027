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
    guide: Tensor | None = None,
    own: int | None = None,
    normalize: bool = True,
) -> Tensor:
    """Multiple-negatives ranking loss: a cross-entropy that selects each text's partner among the batch's candidates.

        loss_i = -log( exp(s_i,i) / sum_j exp(s_i,j) ),   s_i,j = scale · cos(text_i, candidate_j)

    The candidates are all partners, followed by all hard negatives. Candidates that are no negatives of a text are left
    out of its sum: those equal to the text or to its partner, and partners of an equal text.

    With ``guide`` (GIST), the sum also has the terms of the other texts, scale · cos(text_i, text_j), and of the
    partners' partners, scale · cos(partner_i, partner_j), except those equal to text_i or partner_i. Terms whose
    similarity by the guide's vectors is above that of text_i and its partner are left out.

    Args:
        vectors: (pairs, 2, hidden_size), texts and partners, or (pairs, 3, hidden_size) with hard negatives.
        text_ids: int64 (pairs, 2 or 3), equal numbers for equal texts.
        scale: factor of the similarities.
        symmetric: also select each partner's text among the texts; the loss is the mean of both directions.
        guide: (pairs, 2 or 3, width), the vectors of another model for the same texts.
        own: number of the first pairs whose loss is computed. The texts of the other pairs, which are other processes',
            are candidates, each different text once. None: all pairs.
        normalize: False: dot products in place of cosines.
    Returns: float32 scalar, the mean over these pairs.
    Raises: ValueError for other shapes, and for ``guide`` with ``symmetric``.
    Source: Henderson et al. 2017, arXiv:1705.00652; hard negatives as in Gao et al. 2021, arXiv:2104.08821; both
        directions as in Radford et al. 2021, arXiv:2103.00020; guide: Solatorio 2024, arXiv:2402.16829.
    """
    if vectors.dim() != 3 or vectors.shape[1] not in (2, 3) or text_ids.shape != vectors.shape[:2]:
        raise ValueError(
            "ranking_loss needs vectors (pairs, 2 or 3, width) and text_ids of the first two sizes, got "
            f"{tuple(vectors.shape)} and {tuple(text_ids.shape)}"
        )
    if guide is not None and symmetric:
        raise ValueError("ranking_loss takes guide or symmetric, got both: give one")
    pairs = vectors.shape[0] if own is None else own
    row = torch.arange(pairs, device=vectors.device)
    texts, partners = text_ids[:, 0], text_ids[:, 1]
    own_texts, own_partners = texts[:pairs, None], partners[:pairs, None]
    candidates = text_ids[:, 1:].T.flatten()
    itself = row[:, None] == torch.arange(len(candidates), device=row.device)
    left_out = (candidates == own_texts) | (candidates == own_partners)
    left_out |= F.pad(texts == own_texts, (0, len(candidates) - len(texts)))
    # Half precision would round away the small differences between similar texts.
    with _without_autocast(vectors.device.type):
        unit = F.normalize(vectors.float(), dim=2) if normalize else vectors.float()
        of_candidates = unit[:, 1:].transpose(0, 1).flatten(0, 1)
        scores = scale * unit[:pairs, 0] @ of_candidates.T
        left_out |= _repeated(candidates, pairs, len(texts))
        if guide is not None:
            near = _nearer(guide, pairs)
            left_out |= near[:, : len(candidates)]
            among = torch.cat([unit[:pairs, n] @ unit[:, n].T for n in (0, 1)], dim=1)
            others = near[:, len(candidates) :] | torch.cat(
                [
                    (each == own_texts)
                    | (each == own_partners)
                    | _repeated(each, pairs, len(texts))
                    for each in (texts, partners)
                ],
                dim=1,
            )
            among = (scale * among).masked_fill(others, float("-inf"))
    scores = scores.masked_fill(left_out & ~itself, float("-inf"))
    if guide is not None:
        scores = torch.cat((scores, among), dim=1)
    loss = masked_cross_entropy(scores, row)
    if not symmetric:
        return loss
    with _without_autocast(vectors.device.type):
        back = scale * unit[:pairs, 1] @ unit[:, 0].T
    left_out = (texts == own_partners) | (partners == own_partners) | (texts == own_texts)
    left_out |= _repeated(texts, pairs, len(texts))
    back = back.masked_fill(left_out & ~itself[:, : len(texts)], float("-inf"))
    return (loss + masked_cross_entropy(back, row)) / 2


def _repeated(ids: Tensor, own: int, pairs: int) -> Tensor:
    """Which candidates of other processes are equal to one before them: bool (candidates,).

    ``ids``: one block of ``pairs`` candidates after another, of which the first ``own`` are this process's.
    """
    number = torch.arange(len(ids), device=ids.device)
    of_others = number % pairs >= own
    before = (~of_others)[:, None] | (number[:, None] < number)
    return of_others & ((ids[:, None] == ids) & before).any(0)


def _nearer(guides: Tensor, own: int) -> Tensor:
    """Where the guide finds more similarity than between a text and its partner.

    Returns: bool (own, all partners, all hard negatives, all texts and all partners of partners).
    """
    unit = F.normalize(guides.float(), dim=2)
    texts, partners = unit[:own, 0], unit[:own, 1]
    similarities = torch.cat(
        [
            texts @ unit[:, 1:].transpose(0, 1).flatten(0, 1).T,
            texts @ unit[:, 0].T,
            partners @ unit[:, 1].T,
        ],
        dim=1,
    )
    return similarities > (texts * partners).sum(1, keepdim=True)


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


def angle_similarity(one: Tensor, other: Tensor) -> Tensor:
    """AnglE's similarity of vectors whose halves are the real and imaginary parts of complex numbers: (pairs,).

        |cos(x, y) + sum_k (im(x)_k re(y)_k - re(x)_k im(y)_k)|   for x and y of length 1

    Source: Li and Li 2024, arXiv:2309.12871.
    """
    x, y = (F.normalize(F.pad(each, (0, each.shape[1] % 2)), dim=1) for each in (one, other))
    (re_x, im_x), (re_y, im_y) = x.chunk(2, dim=1), y.chunk(2, dim=1)
    return ((x * y).sum(1) + (im_x * re_y - re_x * im_y).sum(1)).abs()


def margin_distillation(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of the margin between partner and hard negative in dot products, against a teacher's.

        loss = mean over pairs of ((q·p - q·n) - (t_p - t_n))²

    Args:
        vectors: (pairs, 3, hidden_size): texts q, partners p and hard negatives n.
        teacher: (pairs, 2), the teacher's scores of (q, p) and (q, n).
    Source: Hofstätter et al. 2020, arXiv:2010.02666.
    """
    products = _dot_products(vectors)
    margins = products[:, 0] - products[:, 1]
    return F.mse_loss(margins, (teacher[:, 0] - teacher[:, 1]).float())


def kl_distillation(vectors: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence of the softmax over a text's candidates from the teacher's, a mean over pairs.

    Args: as :func:`margin_distillation`.
    Source: Lin et al. 2021, doi:10.18653/v1/2021.repl4nlp-1.17.
    """
    student = _dot_products(vectors).log_softmax(1)
    return F.kl_div(student, teacher.float().softmax(1), reduction="batchmean")


def _dot_products(vectors: Tensor) -> Tensor:
    """The dot products of each text with its partner and with its hard negative, (pairs, 2)."""
    return (vectors[:, :1].float() * vectors[:, 1:].float()).sum(2)


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
