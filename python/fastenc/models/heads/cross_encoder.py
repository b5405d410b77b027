"""Cross-encoders: the relevance of a document to a query, read together."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.heads.relevance_losses import LIST_LOSSES, MARGIN
from fastenc.models.heads.sequence_classifier import SequenceClassifier
from fastenc.models.labels import check_labels
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import architecture_of
from fastenc.nn.token_groups import in_groups
from fastenc.packing import PackedBatch

BINARY = "binary-cross-entropy"
LOSSES = (BINARY, *LIST_LOSSES)
# What sentence-transformers may apply to a cross-encoder's logits, by the last part of its name in config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
IN_TORCH = {"Identity": "linear", "Sigmoid": "activation", "Tanh": "activation"}


class CrossEncoder(SequenceClassifier):
    """Scores (query, document) pairs, with the family's head for the classification of sequences and one label.

    Its folder is that of a sentence-transformers CrossEncoder, and :class:`fastenc.Reranker` ranks with it.

    Args:
        loss: "binary-cross-entropy" of each pair, or a loss over each query's candidates:
            those of :mod:`fastenc.models.heads.relevance_losses`.
        activation: "Identity", "Sigmoid" or "Tanh": what makes a score of a logit, stored for prediction. None: as the
            checkpoint says, else Sigmoid for binary cross-entropy and Identity for the other losses.
    Raises: ValueError for another loss or activation, and a checkpoint with several labels.
    Source: Nogueira and Cho 2019, arXiv:1901.04085.
    """

    def __init__(self, config: EncoderConfig, loss: str = BINARY, activation: str | None = None):
        super().__init__(config, num_labels=1)
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss}: give one")
        activation = activation or ("Sigmoid" if loss == BINARY else "Identity")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
        self.loss, self.activation = loss, activation

    @classmethod
    def check_task(cls, folder: Path, hf_config: JsonObject) -> None:
        super().check_task(folder, hf_config)
        if architecture_of(hf_config) == cls.architecture:
            check_labels(folder, hf_config, {"num_labels": 1, "problem_type": "a reranker"})

    @classmethod
    def build(cls, config: EncoderConfig, hf_config: JsonObject, **options) -> "CrossEncoder":
        # A new loss gives other scores than those that the stored activation is for.
        if "loss" not in options:
            options.setdefault("activation", stored_activation(hf_config, "config.json"))
            trained = cast(JsonObject, hf_config.get("task_options") or {})
            options["loss"] = trained.get("loss", BINARY)
        return cls(config, **options)

    def forward(  # type: ignore[override]
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        lists: Tensor | None = None,
        teacher: Tensor | None = None,
        groups: tuple[tuple[int, int, int], ...] | None = None,
    ) -> ModelOutput:
        """Compute the logits of pairs, and with labels the loss.

        Args:
            labels: floating point: (batch,), from 0 to 1, for binary cross-entropy; else (queries, candidates), the
                relevance, -inf where a query has fewer candidates.
            lists: int64 (queries, candidates), the pair of each candidate; any number where there is none.
            teacher: (queries, candidates), the scores of the teacher, for "margin-mse". Without them it has no loss.
            groups: see :func:`fastenc.nn.token_groups.in_groups`.
        Returns: logits (batch, 1) and, with labels, the loss in float32.
        """
        logits = in_groups(self._logits, batch, groups)
        if labels is None:
            return ModelOutput(logits=logits)
        scores = logits.float().squeeze(1)
        if lists is None:
            return ModelOutput(F.binary_cross_entropy_with_logits(scores, labels.float()), logits)
        loss = LIST_LOSSES[self.loss][0]
        if self.loss == MARGIN:
            if teacher is None:
                return ModelOutput(logits=logits)
            loss = partial(loss, teacher=teacher)
        return ModelOutput(loss(scores[lists], labels), logits)

    def _logits(self, batch: PackedBatch) -> Tensor:
        return cast(Tensor, super().forward(batch).logits)

    @classmethod
    def stored_in(cls, folder: Path, hf_config: JsonObject) -> bool:
        """Whether the folder has a classifier with one label and an activation that sentence-transformers reads."""
        one = len(cast(JsonObject, hf_config.get("id2label") or {})) == 1
        return one and super().stored_in(folder, hf_config) and _activation(hf_config) is not None

    def extra_config(self) -> JsonObject:
        name = f"torch.nn.modules.{IN_TORCH[self.activation]}.{self.activation}"
        return super().extra_config() | {"sentence_transformers": {"activation_fn": name}}


def stored_activation(hf_config: JsonObject, where: str | Path) -> str | None:
    """The activation that sentence-transformers has stored in config.json, or None.

    Raises: ValueError, naming ``where``, for one that is not known here.
    """
    stored = _activation(hf_config)
    if stored is None:
        return None
    name = stored.rpartition(".")[2]
    if not stored.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise ValueError(
            f"{where}: the activation of the scores must be torch.nn's {', '.join(ACTIVATIONS)}, got {stored}: give "
            "activation one of these"
        )
    return name


def _activation(hf_config: JsonObject) -> str | None:
    own = hf_config.get("sentence_transformers")
    stored = own.get("activation_fn") if isinstance(own, dict) else None
    stored = stored or hf_config.get("sbert_ce_default_activation_function")
    return None if stored is None else str(stored)
