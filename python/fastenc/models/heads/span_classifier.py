"""Span-based named-entity recognition: a type of entity for spans of words."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.json_values import JsonObject
from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder
from fastenc.models.heads.span_scores import BiaffineScores, BoundaryScores
from fastenc.models.labels import check_names, config_of, names_to_build
from fastenc.models.outputs import ModelOutput
from fastenc.models.pretrained import PretrainedModel, architecture_of
from fastenc.ops import masked_cross_entropy
from fastenc.packing import PackedBatch

REPRESENTATIONS = ("boundary", "biaffine", "attention")


class SpanClassifier(PretrainedModel):
    """Scores every span of words for each type of entity, and for class 0, no entity.

    A word's vector is that of its first subword. It has attended to the other subwords, token classification uses it
    too, and it needs no pooling. transformers has no such model, so a checkpoint has the files of transformers' encoder
    and the head's weights under ``span_head``.

    Args:
        num_labels, label_names: the types of entities; class i + 1 is type i.
        representation: "boundary" or "attention" (:class:`BoundaryScores`), or "biaffine" (:class:`BiaffineScores`).
        span_size: number of units of the head's layers.
        max_span_words: largest number of words of a span.
        length_embedding: add a learned vector for each length of a span; not with "biaffine".
        nested: whether entities may lie inside others.
        null_offset: added to the logit of class 0 when entities are decoded.
    Raises: ValueError for another representation, a size that is not positive, or length_embedding with "biaffine".
    """

    architecture = "ForSpanClassification"

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int | None = None,
        label_names: Sequence[str] | None = None,
        representation: str = "boundary",
        span_size: int = 150,
        max_span_words: int = 10,
        length_embedding: bool = False,
        nested: bool = True,
        null_offset: float = 0.0,
    ):
        super().__init__(config)
        check_span_options(representation, span_size, max_span_words, length_embedding)
        self.label_names = check_names(label_names, num_labels)
        self.representation, self.span_size = representation, span_size
        self.max_span_words, self.length_embedding = max_span_words, length_embedding
        self.nested, self.null_offset = nested, null_offset
        self.encoder = Encoder(config.replace(pooler=False))
        width, classes = config.output_size, len(self.label_names) + 1
        self.head: BiaffineScores | BoundaryScores
        if representation == "biaffine":
            self.head = BiaffineScores(width, classes, span_size)
        else:
            attention = representation == "attention"
            self.head = BoundaryScores(
                width, classes, span_size, max_span_words, attention, length_embedding
            )
        self.dropout_p = config.hidden_dropout_p

    @classmethod
    def build(cls, config: EncoderConfig, hf_config: JsonObject, **options) -> "SpanClassifier":
        names_to_build(hf_config, options)
        if architecture_of(hf_config) == cls.architecture:
            for name, stored in cast(JsonObject, hf_config["span_classifier"]).items():
                given = options.setdefault(name, stored)
                if name in STRUCTURE and given != stored:
                    raise ValueError(
                        f"{name} must be that of the checkpoint's head, {stored}, got {given}: give {stored}, or begin "
                        "from its encoder alone, saved by Encoder.from_pretrained(...).save_pretrained(...)"
                    )
        return cls(config, **options)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        *,
        word_rows: Tensor,
        windows: Tensor,
        starts: Tensor,
        ends: Tensor,
    ) -> ModelOutput:
        """Compute the logits of spans, and with labels the loss. ``fastenc.data.collate_spans`` makes the arguments.

        Args:
            labels: int64 (spans,), the class of each span, 0 for no entity, -100 for no label.
            word_rows: int64 (W,), index among the packed tokens of each word's first subword.
            windows: int64 (W, K), for each word the indices in ``word_rows`` of itself and the K - 1 words after it.
            starts, ends: int64 (spans,), indices in ``word_rows`` of each span's first and last word;
                ends - starts < K.
        Returns: logits (spans, types + 1) and, with labels, the mean cross-entropy of the spans in float32.
        """
        hidden = self.encoder(batch, output_tokens=word_rows).last_hidden_state
        words = F.dropout(hidden, self.dropout_p, self.training)
        logits = self.head(words, windows, starts, ends)
        loss = None if labels is None else masked_cross_entropy(logits, labels)
        return ModelOutput(loss, logits)

    @torch.no_grad()
    def decide(self, logits: Tensor, null_offset: float) -> tuple[Tensor, Tensor, Tensor]:
        """The best type of each span, its margin (its logit minus that of class 0) and its probability.

        Args:
            logits: (spans, types + 1).
            null_offset: added to the logit of class 0; usually ``self.null_offset``.
        Returns: int64, float32 and float32, each (spans,). A span with a positive margin is an entity.
        """
        shifted = logits.float().clone()
        shifted[:, 0] += null_offset
        best, types = shifted[:, 1:].max(1)
        probabilities = shifted.softmax(1).gather(1, types[:, None] + 1)[:, 0]
        return types, best - shifted[:, 0], probabilities

    def init_weights(self, module: nn.Module, name: str = "") -> None:
        if name.partition(".")[0] != "head":
            super().init_weights(module, name)
        elif not any(parameter.is_meta for parameter in self.head.parameters()):
            self.head.reset_parameters()  # all at once, after the last of its modules was allocated

    def head_names(self) -> dict[str, str]:
        names = {f"head.{n}": f"span_head.{n}" for n, _ in self.head.named_modules() if n}
        return {**names, "head.bias": "span_head.bias"}

    def extra_config(self) -> JsonObject:
        span_options = {n: getattr(self, n) for n in (*STRUCTURE, "nested", "null_offset")}
        return {**config_of(self.label_names), "span_classifier": span_options}


STRUCTURE = ("representation", "span_size", "max_span_words", "length_embedding")


def check_span_options(
    representation: str, span_size: int, max_span_words: int, length_embedding: bool
) -> None:
    """Raise ValueError for options that :class:`SpanClassifier` does not take."""
    if representation not in REPRESENTATIONS:
        raise ValueError(
            f"representation must be one of {', '.join(REPRESENTATIONS)}, got {representation}"
        )
    for name, value in (("span_size", span_size), ("max_span_words", max_span_words)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if length_embedding and representation == "biaffine":
        raise ValueError(
            "length_embedding needs the representation boundary or attention, got biaffine: change one of them"
        )
