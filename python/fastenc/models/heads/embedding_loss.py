"""The loss of texts' vectors, as the options of training choose it."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.models.heads.similarity_losses import (
    angle_similarity,
    cosent_loss,
    kl_distillation,
    margin_distillation,
    ranking_loss,
)
from fastenc.nn.gather import rows_of_all

SIMILARITY_LOSSES = ("cosent", "angle", "cosine")
TEACHER_LOSSES = {"margin-mse": margin_distillation, "kl": kl_distillation}
TEMPERATURE = 0.3  # of the divergence between layers, as in sentence-transformers


@dataclass(frozen=True)
class EmbeddingLoss:
    """The loss of vectors of pairs, or of pairs with hard negatives.

    Fields:
        similarity_loss: for pairs with scores: "cosent" (:func:`cosent_loss` of cosine similarities), "angle" (the same
            of :func:`angle_similarity`) or "cosine" (mean squared error between cosine similarity and score).
        scale: factor of the similarities in the ranking loss, CoSENT and AnglE.
        symmetric: see :func:`ranking_loss`.
        gather: in the ranking loss, the texts of the other processes are candidates too.
        matryoshka: numbers of dimensions. The loss is the sum over them of the loss of the vectors' first dimensions,
            scaled to length 1. Empty: all dimensions, once.
        teacher_loss: for pairs with a teacher's scores: "margin-mse" or "kl".
    Raises: ValueError naming the field, the rule and the value.
    Source: Kusupati et al. 2022, arXiv:2205.13147 (Matryoshka).
    """

    similarity_loss: str = "cosent"
    scale: float = 20.0
    symmetric: bool = False
    gather: bool = False
    matryoshka: tuple[int, ...] = ()
    teacher_loss: str = "margin-mse"

    def __post_init__(self) -> None:
        for name, known in (
            ("similarity_loss", SIMILARITY_LOSSES),
            ("teacher_loss", tuple(TEACHER_LOSSES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {known}, got {getattr(self, name)!r}: give one of them"
                )
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}: give another")

    def check_width(self, width: int) -> None:
        """Raises: ValueError for numbers of dimensions that a vector of this width does not have."""
        wrong = [dims for dims in self.matryoshka if not 1 <= dims <= width]
        if wrong:
            raise ValueError(
                f"matryoshka must be numbers from 1 to the vectors' width {width}, got {wrong[0]}: correct it"
            )

    def __call__(
        self,
        vectors: Tensor,
        labels: Tensor,
        text_ids: Tensor,
        guide: Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            vectors: (pairs, 2 or 3, width).
            labels: int64 (pairs,) of any value: the ranking loss. Floating point (pairs,), scores:
                ``similarity_loss``. Floating point (pairs, 2), a teacher's scores of partner and hard negative:
                ``teacher_loss``.
            text_ids, guide: see :func:`ranking_loss`.
        Returns: float32 scalar: a mean over pairs, or the value for the batch of CoSENT and AnglE.
        """
        if self.gather and not labels.is_floating_point():
            vectors, text_ids = rows_of_all(vectors), rows_of_all(text_ids)
            guide = None if guide is None else rows_of_all(guide)
        if not self.matryoshka:
            return self._of(vectors, labels, text_ids, guide)
        cut = [F.normalize(vectors[..., :dims], dim=-1) for dims in self.matryoshka]
        return torch.stack([self._of(each, labels, text_ids, guide) for each in cut]).sum()

    def _of(
        self, vectors: Tensor, labels: Tensor, text_ids: Tensor, guide: Tensor | None
    ) -> Tensor:
        if not labels.is_floating_point():
            return ranking_loss(
                vectors,
                text_ids,
                scale=self.scale,
                symmetric=self.symmetric,
                guide=guide,
                own=len(labels),
            )
        if labels.dim() == 2:
            return TEACHER_LOSSES[self.teacher_loss](vectors, labels)
        one, other = vectors[:, 0].float(), vectors[:, 1].float()
        if self.similarity_loss == "angle":
            return cosent_loss(angle_similarity(one, other), labels, scale=self.scale)
        similarities = F.cosine_similarity(one, other, dim=1)
        if self.similarity_loss == "cosent":
            return cosent_loss(similarities, labels, scale=self.scale)
        return F.mse_loss(similarities, labels.float())


def divergence_from_last(earlier: Tensor, last: Tensor) -> Tensor:
    """KL divergence of an earlier layer's vectors from the last layer's, a mean over texts, times the temperature 0.3.

    Both are taken as logits of a softmax; the last layer gets no gradient from it.
    Source: Li et al. 2024, arXiv:2402.14776 (2D Matryoshka).
    """
    target = (last.flatten(0, -2).float() / TEMPERATURE).softmax(1).detach()
    student = (earlier.flatten(0, -2).float() / TEMPERATURE).log_softmax(1)
    return TEMPERATURE * F.kl_div(student, target, reduction="batchmean")
