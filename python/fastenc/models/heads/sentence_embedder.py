"""Sentence embeddings: vectors of texts whose cosine similarity measures the similarity in meaning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.sentence_files import (
    MODULES,
    SentenceSettings,
    lowercased,
    read_settings,
)
from fastenc.models.embedding.splade_files import is_splade
from fastenc.models.encoder import Encoder
from fastenc.models.heads.embedding_loss import EmbeddingLoss, divergence_from_last
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import (
    FINE_TUNED,
    PretrainedModel,
    another_task,
    architecture_of,
)
from fastenc.nn.pooling import check_pooling, pool
from fastenc.nn.token_groups import in_groups
from fastenc.packing import PackedBatch


class SentenceEmbedder(PretrainedModel):
    """An encoder without its pooler, with a pooling that is saved in sentence-transformers' files.

    Args:
        pooling: "cls", "last-token", "mean", "max" or "last-four" (:func:`fastenc.nn.pooling.pool_layers`). None: as
            the checkpoint says, else "mean".
        max_length: number of tokens to which texts are cut. None: as the checkpoint says, else the model's positions.
        matryoshka_layers: in training, also compute the loss of the vectors of a layer before the last, which is drawn
            for every batch, and the divergence of these from the last layer's vectors (2-D Matryoshka).
        prompts: texts that may be put before each text, by name, added to those of the checkpoint. ``encode`` takes the
            name, and sentence-transformers' encode_query and encode_document read "query" and "document".
        loss: fields of :class:`fastenc.models.heads.embedding_loss.EmbeddingLoss`. Those that are left out are as
            in the checkpoint's training.
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
        matryoshka_layers: bool = False,
        prompts: Mapping[str, str] | None = None,
        **loss: Any,
    ):
        super().__init__(config)
        self.loss = EmbeddingLoss(**{**loss, "matryoshka": tuple(loss.get("matryoshka", ()))})
        if matryoshka_layers and config.num_layers < 2:
            raise ValueError(
                f"matryoshka_layers needs a model of two layers or more, got {config.num_layers}: leave it out"
            )
        if matryoshka_layers and self.loss.gather:
            raise ValueError(
                "matryoshka_layers and gather exclude each other, because every process draws another layer, got both: "
                "leave out one of them"
            )
        self.matryoshka_layers = matryoshka_layers
        self.encoder = Encoder(config.replace(pooler=False))
        given = {"pooling": pooling, "max_length": max_length}
        self._given: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        self._prompts = prompts or {}
        self._take(SentenceSettings())

    @classmethod
    def _option_names(cls) -> list[str]:
        *own, _ = super()._option_names()
        return [*own, *EmbeddingLoss.__dataclass_fields__]

    @classmethod
    def build(cls, config: EncoderConfig, hf_config: JsonObject, **options) -> "SentenceEmbedder":
        trained = cast(JsonObject, hf_config.get("task_options") or {})
        for name in EmbeddingLoss.__dataclass_fields__:
            if name in trained:
                options.setdefault(name, trained[name])
        return cls(config, **options)

    @property
    def settings(self) -> SentenceSettings:
        assert self.encoder.sentence is not None
        return self.encoder.sentence

    def _take(self, declared: SentenceSettings) -> None:
        """Take the checkpoint's settings, except those that the constructor was given."""
        prompts = {**declared.prompts, **self._prompts}
        settings = replace(declared, prompts=prompts, **self._given)
        self.loss.check_width(settings.width(self.config.output_size))
        check_pooling(settings.pooling, self.config.num_layers)
        if self.config.layer_mix and settings.pooling == "last-four":
            raise ValueError(
                "pooling must not be last-four for a model with layer_mix, which reads a mix of all layers: give "
                "another pooling, or set layer_mix=False"
            )
        if self.matryoshka_layers and settings.pooling == "last-four":
            raise ValueError(
                "pooling must not be last-four with matryoshka_layers, which pools single layers: give mean"
            )
        self.encoder.sentence = settings

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        text_ids: Tensor | None = None,
        groups: tuple[tuple[int, int, int], ...] | None = None,
        guide: Tensor | None = None,
    ) -> ModelOutput:
        """Embed texts; with labels also compute the loss.

        Args:
            batch: the texts, those of one example after those of the other.
            labels: of :class:`fastenc.models.heads.embedding_loss.EmbeddingLoss`: int64 (examples,) selects the ranking
                loss over texts, partners and hard negatives, floating point (examples,) scores of pairs
                ``similarity_loss``, floating point (examples, 2) scores of a teacher ``teacher_loss``.
            text_ids: int64 (examples, texts per example), equal numbers for equal texts. None: single texts.
            groups: see :func:`fastenc.nn.token_groups.in_groups`. None: all texts at once.
            guide: (examples, texts per example, width), another model's vectors, which say what is no negative.
        Returns: the vectors as logits, (examples, texts per example, width), or (batch, width) without text_ids; with
            labels also the loss in float32, a mean over examples, or the value for the batch of CoSENT and AnglE.
        """
        layer = None
        if self.matryoshka_layers and self.training and labels is not None:
            layer = int(torch.randint(1, self.config.num_layers, ()))
        vectors = in_groups(lambda part: self._vectors(part, layer), batch, groups)
        if text_ids is None:
            if labels is not None:
                raise ValueError(
                    "the loss needs text_ids (examples, texts per example), got None: give them with labels"
                )
            return ModelOutput(logits=vectors)
        states = [
            each.unflatten(0, tuple(text_ids.shape))
            for each in (vectors.unbind(1) if layer else (vectors,))
        ]
        last, *earlier = states
        if labels is None:
            return ModelOutput(logits=last)
        # A single process evaluates, while the others wait.
        loss_of = self.loss if self.training else replace(self.loss, gather=False)
        loss = loss_of(last, labels, text_ids, guide)
        for each in earlier:
            loss = loss + loss_of(each, labels, text_ids, guide) + divergence_from_last(each, last)
        return ModelOutput(loss, last.clone())  # FSDP warns of an output that is a view

    def _vectors(self, batch: PackedBatch, layer: int | None = None) -> Tensor:
        """The vectors of texts, (batch, width); with a layer also its, (batch, 2, width)."""
        pooling = self.settings.pooling
        if layer is None:
            vectors = self.encoder.pooled_vectors(batch, pooling)
        else:
            output = self.encoder(batch, output_hidden_states=(layer,), pooled=False)
            assert output.hidden_states is not None
            earlier = self.encoder.project_output(output.hidden_states[layer])
            states = (output.last_hidden_state, earlier)
            each = [pool(state, batch.cu_seqlens, pooling) for state in states]
            vectors = torch.stack([*map(self.settings.after_pooling, each)], 1)
        return F.normalize(vectors, dim=-1) if self.settings.normalize else vectors

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
        self.tokenizer = lowercased(self.tokenizer, folder)

    def write_beside(self, folder: Path) -> None:
        self.encoder.write_beside(folder)

    def extra_config(self) -> JsonObject:
        return self.encoder.extra_config()
