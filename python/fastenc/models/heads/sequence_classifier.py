"""Sequence classification with one label or several labels per sequence, and regression."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base import debug
from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import encoder_under_head
from fastenc.models.heads.chunk_aggregation import ChunkAttention, chunk_aggregator
from fastenc.models.heads.prediction_head import PredictionHead
from fastenc.models.labels import check_names, config_of, names_to_build
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel, architecture_of
from fastenc.nn.pooling import pool
from fastenc.ops.labelled import IGNORED
from fastenc.packing import Documents, PackedBatch, first_tokens, last_tokens, single_chunks
from fastenc.text.long_texts import LongTexts

PROBLEM_TYPES = ("single_label_classification", "regression", "multi_label_classification")


class SequenceClassifier(PretrainedModel):
    """Predicts one label, several labels, or one number for a sequence or a pair of sequences, with the family's head.

    BERT's head is a linear layer over the pooler. Those of RoBERTa (tanh), ELECTRA (GELU) and DistilBERT (ReLU) are a
    dense layer over the first token, activation and a linear layer, with dropout before each linear layer. Those of
    Qwen3 and Gemma 3 are a linear layer without bias over the last token that is not padding.

    With chunks, the head's inputs (pooler's output or first token) of a document's chunks are aggregated to one vector
    (:mod:`fastenc.models.heads.chunk_aggregation`), and the head computes one result per document. Weights of the
    aggregation are saved beside the family's weights; transformers ignores them.

    Args:
        num_labels: number of classes; 1 for regression.
        problem_type: "single_label_classification" (cross-entropy), "multi_label_classification" (binary
            cross-entropy of every label) or "regression" (mean squared error). None: regression for one label, else
            single_label_classification.
        label_names: names of the classes, stored in config.json.
        long_texts: how texts are converted to sequences, as LongTexts or its fields. The model uses ``chunks`` and
            ``max_chunks``; all fields are stored in config.json, for prediction.
    Raises: ValueError for an unknown problem_type, other numbers of labels and names, or a family without such a head.
    """

    architecture = "ForSequenceClassification"
    optional_parts = ("aggregator",)

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int | None = None,
        problem_type: str | None = None,
        label_names: Sequence[str] | None = None,
        long_texts: LongTexts | dict[str, Any] | None = None,
    ):
        names = check_names(label_names, num_labels)
        num_labels = len(names)
        problem_type = problem_type or (PROBLEM_TYPES[1] if num_labels == 1 else PROBLEM_TYPES[0])
        if problem_type not in PROBLEM_TYPES:
            raise ValueError(f"problem_type must be one of {PROBLEM_TYPES}, got {problem_type!r}")
        super().__init__(config)
        self.problem_type, self.label_names = problem_type, names
        spec = config.architecture.classifier
        if spec is None:
            raise ValueError(
                f"the model's family must have a head that classifies sequences, got {config.family}: take a model of "
                "another family"
            )
        self.encoder = encoder_under_head(config, spec.pooler)
        self.reads_pooler = spec.pooler
        p = config.classifier_dropout_p
        p = config.hidden_dropout_p if p is None else p
        self.head = PredictionHead(config, spec, num_labels, p)
        self.init_modules(self.head)
        self.pooling = config.architecture.classifier_pooling(config)
        if not isinstance(long_texts, LongTexts):
            long_texts = LongTexts(**(long_texts or {}))
        self.long_texts, self.aggregator = long_texts, None
        single = problem_type == "single_label_classification"
        self.loss_ignores_padding = single and long_texts.chunks is None
        if long_texts.chunks is not None:
            self.aggregator = chunk_aggregator(long_texts.chunks, config, long_texts.max_chunks)
            self.init_modules(self.aggregator)

    @classmethod
    def build(cls, config: EncoderConfig, hf_config: JsonObject, **options) -> "SequenceClassifier":
        names_to_build(hf_config, options)
        options.setdefault("problem_type", hf_config.get("problem_type"))
        if architecture_of(hf_config) == cls.architecture:
            options.setdefault("long_texts", hf_config.get("long_texts"))
        return cls(config, **options)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        documents: Documents | None = None,
    ) -> ModelOutput:
        """Compute logits, and with labels the loss.

        With ``documents``, "batch" in the shapes below is the number of documents. Without gradients, one group of
        chunks after the other is encoded (``Documents.groups``), so that memory does not grow with the number of
        chunks. With gradients all chunks are encoded at once.

        Args:
            labels: one of: int64 (batch,), a class for each sequence, -100 for no label; floating point (batch,),
                targets of a regression; floating point (batch, num_labels), 1 for each label of a sequence and 0 for
                the others, for several labels per sequence.
            documents: the documents whose chunks the sequences are. None: each sequence is a document.
        Returns: logits (batch, num_labels) and, with labels, the mean loss in float32.
        Raises: ValueError for documents if the model has no aggregation, and for labels of a wrong shape, dtype or
            value.
        """
        if documents is not None and self.aggregator is None:
            raise ValueError(
                "documents need a model that aggregates chunks, got one without aggregation: load it with "
                "long_texts={'chunks': 'mean'} or another aggregation"
            )
        if self.aggregator is None:
            features = self._vectors(batch)
        else:
            documents = documents or single_chunks(batch)
            # A batch with ``hidden`` was encoded before and needs no groups.
            whole = batch.hidden is not None or torch.is_grad_enabled()
            whole = whole or torch.compiler.is_compiling()
            groups = [batch] if whole else batch.split(documents.groups)
            vectors = torch.cat([self._vectors(group) for group in groups])
            features = self.aggregator(vectors, documents)
        logits = self.head.last(features) if self.pooling == "late" else self.head(features)
        if labels is None:
            return ModelOutput(logits=logits)
        if self.problem_type == "regression":
            numbers = logits.float().squeeze(1)
            # torch would compare each number with each target.
            if labels.shape != numbers.shape:
                raise ValueError(
                    f"labels must be of shape {tuple(numbers.shape)}, a number to predict for each sequence, got shape "
                    f"{tuple(labels.shape)}: reshape them"
                )
            return ModelOutput(F.mse_loss(numbers, labels.float()), logits)
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
                f"labels must be int64 of shape ({logits.shape[0]},), one class per sequence, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if debug.may_read(labels) and labels.numel():
            low, high = (int(value) for value in labels.where(labels != IGNORED, 0).aminmax())
            if low < 0 or high >= logits.shape[1]:
                raise ValueError(
                    f"labels must be in [0, {logits.shape[1]}), got {low if low < 0 else high}: "
                    "give num_labels when loading the model"
                )
        return ModelOutput(F.cross_entropy(logits.float(), labels), logits)

    def encoder_batch(self, batch: PackedBatch) -> PackedBatch:
        """In an encoder with global attention, the first token of a sequence is global."""
        if batch.global_tokens is not None or not self.encoder.stack.has_global_attention:
            return batch
        return replace(batch, global_tokens=first_tokens(batch))

    def _vectors(self, batch: PackedBatch) -> Tensor:
        """The head's input for each sequence, (batch, hidden_size); with "late" pooling, that of its last layer."""
        encoder, batch = self.encoder, self.encoder_batch(batch)
        if self.pooling == "cls":
            states = encoder.first_states(batch)
            return encoder.pool_first(states) if self.reads_pooler else states
        if self.pooling == "last":
            rows = last_tokens(batch, self.config.pad_token_id)
            return encoder(batch, output_tokens=rows).last_hidden_state
        states = encoder(batch, pooled=False).last_hidden_state
        if self.pooling == "late":
            return pool(self.head.transform(states), batch.cu_seqlens, "mean")
        return pool(states, batch.cu_seqlens, self.pooling)

    def init_weights(self, module: nn.Module, name: str = "") -> None:
        super().init_weights(module, name)
        if isinstance(module, ChunkAttention):
            nn.init.normal_(module.query, std=self.config.initializer_range)

    def head_names(self) -> dict[str, str]:
        aggregation = [
            name for name, _ in self.named_parameters() if name.startswith("aggregator.")
        ]
        return self.head.names("head") | {name: name for name in aggregation}

    def extra_config(self) -> JsonObject:
        return {
            **config_of(self.label_names),
            "problem_type": self.problem_type,
            "long_texts": asdict(self.long_texts),
        }
