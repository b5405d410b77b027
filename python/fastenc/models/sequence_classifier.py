"""Sequence classification, with one label or several, and regression over the encoder."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.families import FAMILIES
from fastenc.models.labels import check_names, config_of, names_to_build
from fastenc.models.masked_lm import ModelOutput
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.pooling import pool
from fastenc.packing import PackedBatch

PROBLEM_TYPES = ("single_label_classification", "regression", "multi_label_classification")


class SequenceClassifier(PretrainedModel):
    """One label, several, or one number for a sequence or a pair of sequences, with the family's own head.

    BERT: linear over the pooler. RoBERTa (tanh), ELECTRA (GELU), DistilBERT (ReLU): dense layer over the first
    token, activation, linear; dropout before each linear.

    Args:
        num_labels: classes; 1 for regression.
        problem_type: "single_label_classification" (cross-entropy), "multi_label_classification" (binary
            cross-entropy of every label) or "regression" (mean squared error); None takes regression for one label.
        label_names: names of the classes, kept in config.json.
    """

    architecture = "ForSequenceClassification"

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int | None = None,
        problem_type: str | None = None,
        label_names: Sequence[str] | None = None,
    ):
        names = check_names(label_names, num_labels)
        num_labels = len(names)
        problem_type = problem_type or (PROBLEM_TYPES[1] if num_labels == 1 else PROBLEM_TYPES[0])
        if problem_type not in PROBLEM_TYPES:
            raise ValueError(f"problem_type must be one of {PROBLEM_TYPES}, got {problem_type!r}")
        super().__init__(config)
        self.problem_type, self.label_names = problem_type, names
        self.kind_of_head = FAMILIES[config.family].classifier_kind
        has_pooler = self.kind_of_head == "pooler"
        self.encoder = Encoder(config.replace(pooler=has_pooler))
        width = config.hidden_size
        self.head = nn.ModuleDict()
        if not has_pooler:
            self.head["dense"] = nn.Linear(width, width)
        self.head["out"] = nn.Linear(width, num_labels)
        self.head.apply(self.init_weights)
        p = config.classifier_dropout_p
        self.dropout_p = config.hidden_dropout_p if p is None else p

    @classmethod
    def build(
        cls, config: EncoderConfig, hf_config: dict[str, Any], **options
    ) -> "SequenceClassifier":
        names_to_build(cls.architecture, hf_config, options)
        options.setdefault("problem_type", hf_config.get("problem_type"))
        return cls(config, **options)

    def forward(self, batch: PackedBatch, labels: Tensor | None = None) -> ModelOutput:
        """Args: labels: int64 (batch,) classes, floating (batch,) targets of a regression, or floating
            (batch, num_labels), 1 at a sequence's labels and 0 elsewhere, with several labels a sequence.

        Returns: logits (batch, num_labels) and, with labels, the mean loss in float32.
        """
        output = self.encoder(batch)
        if output.pooled is not None:
            features = output.pooled
        else:
            features = pool(output.last_hidden_state, batch.cu_seqlens, "cls")
            if self.kind_of_head != "relu":  # DistilBERT has no dropout before its dense layer
                features = F.dropout(features, self.dropout_p, self.training)
            features = getattr(torch.nn.functional, self.kind_of_head)(self.head["dense"](features))
        logits = self.head["out"](F.dropout(features, self.dropout_p, self.training))
        if labels is None:
            return ModelOutput(logits=logits)
        if self.problem_type == "regression":
            return ModelOutput(F.mse_loss(logits.float().squeeze(1), labels.float()), logits)
        if self.problem_type == "multi_label_classification":
            if not labels.is_floating_point() or labels.shape != logits.shape:
                raise ValueError(
                    f"labels must be floating point of shape {tuple(logits.shape)}, 0 or 1 for each label of each "
                    f"sequence, got {labels.dtype} of shape {tuple(labels.shape)}"
                )
            loss = F.binary_cross_entropy_with_logits(logits.float(), labels.float())
            return ModelOutput(loss, logits)
        if labels.dtype != torch.int64 or labels.shape != logits.shape[:1]:
            raise ValueError(
                f"labels must be int64 of shape ({logits.shape[0]},), one class a sequence, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if labels.device.type == "cpu" and not torch.compiler.is_compiling() and labels.numel():
            low, high = (int(value) for value in labels.aminmax())
            if low < 0 or high >= logits.shape[1]:
                raise ValueError(
                    f"labels must be in [0, {logits.shape[1]}), got {low if low < 0 else high}: "
                    "give num_labels when loading the model"
                )
        return ModelOutput(F.cross_entropy(logits.float(), labels), logits)

    def head_names(self) -> dict[str, str]:
        names = FAMILIES[self.config.family].classifier
        return {f"head.{ours}": theirs for ours, theirs in names.items()}

    def extra_config(self) -> dict[str, Any]:
        return {**config_of(self.label_names), "problem_type": self.problem_type}
