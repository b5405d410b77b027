"""Sentence embeddings: vectors of texts whose cosine similarity measures the similarity in meaning."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.sentence_files import MODULES, SentenceSettings, read_settings
from fastenc.models.embedding.splade_files import is_splade
from fastenc.models.encoder import Encoder
from fastenc.models.heads.similarity_losses import cosent_loss, ranking_loss
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import (
    FINE_TUNED,
    PretrainedModel,
    another_task,
    architecture_of,
)
from fastenc.nn.pooling import check_pooling
from fastenc.packing import PackedBatch

SIMILARITY_LOSSES = ("cosent", "cosine")


class SentenceEmbedder(PretrainedModel):
    """An encoder without its pooler, with a pooling that is saved in sentence-transformers' files.

    Args:
        pooling: "cls", "mean", "max" or "last-four" (:func:`fastenc.nn.pooling.pool_layers`). None: as the checkpoint
            says, else "mean".
        max_length: number of tokens to which texts are cut. None: as the checkpoint says, else the model's positions.
        similarity_loss: the loss for pairs with scores: "cosent"
            (:func:`fastenc.models.heads.similarity_losses.cosent_loss`) or "cosine", the mean squared error
            between cosine similarity and score.
        scale: factor of the cosine similarities in the ranking loss and in CoSENT.
        symmetric: see :func:`fastenc.models.heads.similarity_losses.ranking_loss`.
    Raises: ValueError naming the argument, the rule and the value.
    Source: Reimers and Gurevych 2019, arXiv:1908.10084.
    """

    architecture = "Model"

    @classmethod
    def check_task(cls, folder: Path, hf_config: JsonObject) -> None:
        """Raise ValueError for a checkpoint with a fine-tuned head, which would be lost."""
        if architecture_of(hf_config) in FINE_TUNED:
            raise another_task(cls, folder, hf_config)

    def __init__(
        self,
        config: EncoderConfig,
        pooling: str | None = None,
        max_length: int | None = None,
        similarity_loss: str = "cosent",
        scale: float = 20.0,
        symmetric: bool = False,
    ):
        super().__init__(config)
        if similarity_loss not in SIMILARITY_LOSSES:
            raise ValueError(
                f"similarity_loss must be one of {SIMILARITY_LOSSES}, got {similarity_loss!r}"
            )
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.encoder = Encoder(config.replace(pooler=False))
        given = {"pooling": pooling, "max_length": max_length}
        self._given: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        self._take(SentenceSettings())
        self.similarity_loss, self.scale, self.symmetric = similarity_loss, scale, symmetric

    @property
    def settings(self) -> SentenceSettings:
        assert self.encoder.sentence is not None
        return self.encoder.sentence

    def _take(self, declared: SentenceSettings) -> None:
        """Take the checkpoint's settings, except those that the constructor was given."""
        settings = replace(declared, **self._given)
        check_pooling(settings.pooling, self.config.num_layers)
        if self.config.layer_mix and settings.pooling == "last-four":
            raise ValueError(
                "pooling must not be last-four for a model with layer_mix, which reads a mix of all layers: give "
                "another pooling, or set layer_mix=False"
            )
        self.encoder.sentence = settings

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, text_ids: Tensor | None = None
    ) -> ModelOutput:
        """Embed texts; with labels also compute the loss.

        Args:
            batch: the texts, those of one example after those of the other.
            labels: int64 (examples,) of any value selects the ranking loss over texts, partners and hard negatives.
                Floating point (examples,), scores of pairs, selects ``similarity_loss``.
            text_ids: int64 (examples, texts per example), equal numbers for equal texts. None: single texts.
        Returns: the vectors as logits, (examples, texts per example, hidden_size), or (batch, hidden_size) without
            text_ids; with labels also the loss in float32, a mean over examples, or CoSENT's value for the batch.
        """
        vectors = self.encoder.pooled_vectors(batch, self.settings.pooling)
        if self.settings.normalize:
            vectors = F.normalize(vectors, dim=1)
        if text_ids is None:
            if labels is not None:
                raise ValueError(
                    "the loss needs text_ids (examples, texts per example), got None: give them with labels"
                )
            return ModelOutput(logits=vectors)
        vectors = vectors.unflatten(0, tuple(text_ids.shape))
        if labels is None:
            return ModelOutput(logits=vectors)
        if not labels.is_floating_point():
            loss = ranking_loss(vectors, text_ids, scale=self.scale, symmetric=self.symmetric)
            return ModelOutput(loss, vectors)
        one, other = vectors[:, 0].float(), vectors[:, 1].float()
        similarities = F.cosine_similarity(one, other, dim=1)
        if self.similarity_loss == "cosent":
            return ModelOutput(cosent_loss(similarities, labels, scale=self.scale), vectors)
        return ModelOutput(F.mse_loss(similarities, labels.float()), vectors)

    @torch.inference_mode()
    def encode(self, texts: str | Sequence[str], **options: Any) -> Tensor:
        """Vectors of texts: :meth:`fastenc.Encoder.encode` with this model's tokenizer."""
        self.encoder.tokenizer = self.tokenizer
        return self.encoder.encode(texts, **options)

    @classmethod
    def stored_in(cls, folder: Path, hf_config: JsonObject) -> bool:
        return (folder / MODULES).exists() and not is_splade(folder)

    def read_beside(self, folder: Path) -> None:
        self._take(read_settings(folder, self.config) or SentenceSettings())

    def write_beside(self, folder: Path) -> None:
        self.encoder.write_beside(folder)

    def extra_config(self) -> JsonObject:
        return self.encoder.extra_config()
