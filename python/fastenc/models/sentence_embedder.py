"""Vectors of texts whose cosine similarity is that of their meanings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import (
    FINE_TUNED,
    PretrainedModel,
    another_task,
    architecture_of,
)
from fastenc.models.sentence_files import MODULES, SentenceSettings, read_settings
from fastenc.models.similarity_losses import cosent_loss, ranking_loss
from fastenc.nn.pooling import check_pooling
from fastenc.packing import PackedBatch

SIMILARITY_LOSSES = ("cosent", "cosine")


class SentenceEmbedder(PretrainedModel):
    """An encoder without its pooler, and a pooling that is saved in sentence-transformers' files.

    Args:
        pooling: "cls", "mean", "max" or "last-four" (:func:`fastenc.nn.pooling.pool_layers`); None: what the checkpoint
            declares, else "mean".
        max_length: tokens at which texts are cut, likewise; else the model's positions.
        similarity_loss: on pairs with scores, "cosent" (:func:`fastenc.models.similarity_losses.cosent_loss`) or
            "cosine", the mean squared error of the cosine similarity.
        scale: factor on cosine similarities in the losses that compare them.
        symmetric: as in :func:`fastenc.models.similarity_losses.ranking_loss`.
    Raises: ValueError naming the argument, the rule and the value.
    Source: Reimers and Gurevych 2019, arXiv:1908.10084.
    """

    architecture = "Model"

    @classmethod
    def check_task(cls, folder: Path, hf_config: dict[str, Any]) -> None:
        """Raises: ValueError for a checkpoint with a fine-tuned head, which would be lost."""
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
        """What is declared, but for what the constructor was given."""
        settings = replace(declared, **self._given)
        check_pooling(settings.pooling, self.config.num_layers)
        if self.config.layer_mix and settings.pooling == "last-four":
            raise ValueError(
                "pooling last-four takes the last four layers as they are, and the model mixes all of them: give "
                "another pooling, or leave out the mix"
            )
        self.encoder.sentence = settings

    def forward(
        self, batch: PackedBatch, labels: Tensor | None = None, text_ids: Tensor | None = None
    ) -> ModelOutput:
        """Args:
            batch: the texts of each example after one another.
            labels: int64 (examples,), for texts and their partners (and hard negatives): the ranking loss, whose
                candidates are those of the batch. Or floating point (examples,), scores of pairs.
            text_ids: int64 (examples, texts an example), equal numbers for equal texts; None: one text an example.

        Returns: as logits the vectors, (examples, texts an example, hidden_size) or without text_ids (batch,
            hidden_size), and with labels the mean loss in float32; CoSENT's is one number for the batch.
        """
        vectors = self.encoder.pooled_vectors(batch, self.settings.pooling)
        if self.settings.normalize:
            vectors = F.normalize(vectors, dim=1)
        if text_ids is None:
            if labels is not None:
                raise ValueError("the loss needs text_ids, (examples, texts an example), got none")
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
    def encode(self, texts: Any, **options: Any) -> Tensor:
        """:meth:`fastenc.Encoder.encode`."""
        self.encoder.tokenizer = self.tokenizer
        return self.encoder.encode(texts, **options)

    @classmethod
    def stored_in(cls, folder: Path, hf_config: dict[str, Any]) -> bool:
        return (folder / MODULES).exists()

    def read_beside(self, folder: Path) -> None:
        self._take(read_settings(folder, self.config) or SentenceSettings())

    def write_beside(self, folder: Path) -> None:
        self.encoder.write_beside(folder)

    def extra_config(self) -> dict[str, Any]:
        return self.encoder.extra_config()
