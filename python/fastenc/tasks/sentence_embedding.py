"""The task of sentence embedding: vectors of texts, learnt from pairs of similar texts or from similarity scores."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data.pairs import PairExample, TextPairs, collate_pairs, encode_pairs, read_pairs
from fastenc.data.rows import numbered_rows
from fastenc.models import SentenceEmbedder
from fastenc.models.heads.embedding_loss import EmbeddingLoss
from fastenc.packing import ModelArguments
from fastenc.tasks.metrics import regression_metrics, retrieval_metrics
from fastenc.tasks.other_models import guide_vectors, teacher_scores
from fastenc.tasks.ranking_metrics import METRICS, require_trec_eval
from fastenc.tasks.shared_options import QUOTING, TOKENS_AT_ONCE, check_tokens_at_once
from fastenc.tasks.summary import number_range
from fastenc.tasks.text_pairs import TextPairTask

# option: the option that chooses its loss
OPTIONS_OF = {
    "similarity_loss": "similarity",
    "highest_similarity": "similarity",
    "teacher_loss": "teacher",
}
# option: those that choose a loss which does not read it
NOT_WITH = {
    "symmetric": ("similarity", "teacher", "guide"),
    "gather": ("similarity", "teacher"),
    "scale": ("teacher",),
}
# Columns that are likely to be meant for training, though an option has to name them.
SCORES, NEGATIVES = ("score", "similarity"), ("negative", "hard_negative")


@dataclass(frozen=True)
class SentenceEmbedding(TextPairTask[SentenceEmbedder]):
    """Vectors whose cosine similarity measures how similar two texts are.

    Without ``similarity``, the loss is contrastive: the negatives of a pair are the other partners in its micro-batch
    and the hard negatives, with ``gather`` also those of the other processes. Larger micro-batches have more negatives,
    and ``tokens_at_once`` gives them the memory of small ones. Gradient accumulation adds none. Equal texts are not
    negatives of one another. ``guide`` is a model that says which texts are none either.

    With ``teacher``, a cross-encoder's scores of a text with its partner and with its hard negative are learnt.

    With ``similarity``, similarities are trained to have the order of the scores (``similarity_loss`` "cosent" for
    cosine, "angle" for AnglE's similarity), or cosine similarities their values ("cosine").

    Guide and teacher read each text once, without prompts, before the first step.

    Predictions are vectors: float32 (pairs, texts of a pair, width). Files of predictions contain the
    similarities.
    """

    name = "sentence-embedding"
    model_class = SentenceEmbedder
    of_texts = "Encoder.encode gives the vectors of texts"

    max_length: int | None = option(
        None,
        "Longest text in tokens; longer ones are cut. Default: as the checkpoint says, else its number of positions.",
        predict=True,
    )
    text: tuple[str, ...] = option(
        ("sentence1", "sentence2"),
        "Columns of a text, its partner and, optionally, a hard negative.",
        "-t",
        predict=True,
    )
    query_prompt: str | None = option(
        None,
        'Text to put before the first text of each pair, such as "query: ". The model keeps it as prompt "query".',
        predict=True,
    )
    document_prompt: str | None = option(
        None,
        'Text to put before the other texts of each pair. The model keeps it as prompt "document".',
        predict=True,
    )
    quoting: str | None = option(None, QUOTING, predict=True)
    similarity: str | None = option(
        None, "Column of the pairs' similarity scores. Default: none, each pair is a positive pair."
    )
    highest_similarity: float | None = option(
        None, "Score of two texts with the same meaning. Default: the highest in the training set."
    )
    similarity_loss: str = option(
        "cosent",
        "Loss with scores: cosent (the order of the pairs), angle (the same by AnglE's similarity), or cosine (squared "
        "error of the similarity).",
    )
    pooling: str | None = option(
        None,
        "How a text's token vectors become one: cls, last-token, mean, max or last-four. Default: as the checkpoint "
        "says, else mean.",
    )
    scale: float = option(20.0, "Factor on similarities in the loss, the inverse of a temperature.")
    symmetric: bool = option(
        False,
        "Without scores: also rank the texts for each partner, not only the partners for each text.",
    )
    gather: bool = option(
        False, "Without scores: texts of the other processes' micro-batches are negatives too."
    )
    tokens_at_once: int | None = option(None, TOKENS_AT_ONCE)
    matryoshka: tuple[int, ...] = option(
        (),
        "Number of first dimensions that are trained as a vector too; give it several times, the full width included.",
    )
    matryoshka_layers: bool = option(
        False, "Also train the vectors of a layer before the last, drawn for every micro-batch."
    )
    guide: str | None = option(
        None,
        "Folder or name of a model of sentence vectors. Texts that it finds more similar than a pair are no negatives "
        "of it (GIST).",
    )
    teacher: str | None = option(
        None,
        "Folder or name of a cross-encoder whose scores are learnt. The third text column holds hard negatives.",
    )
    teacher_loss: str = option(
        "margin-mse", "Loss with a teacher: margin-mse, or kl (over partner and hard negative)."
    )
    truncate_dim: int | None = option(
        None,
        "Measure, and predict similarities of, the first dimensions of the vectors only (Matryoshka).",
        predict=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [n for n in ("similarity", "teacher", "guide") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(
                f"similarity, teacher and guide are for different losses, got {' and '.join(given)}: give one"
            )
        if self.teacher is not None and len(self.text) != 3:
            raise ValueError(
                f"teacher needs a third text column with hard negatives, got {', '.join(self.text)}: give -t "
                "three times"
            )
        check_tokens_at_once(self.tokens_at_once)
        if self.truncate_dim is not None and self.truncate_dim < 1:
            raise ValueError(f"truncate_dim must be at least 1, got {self.truncate_dim}: give more")

    def _check_options_of_losses(self) -> None:
        """Raises: ValueError for an option that the chosen loss does not read."""
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        for name, needed in OPTIONS_OF.items():
            if name in given and needed not in given:
                raise ValueError(
                    f"{name} is for the loss with {needed}, got {given[name]!r} without {needed}: give {needed}, or "
                    f"leave out {name}"
                )
        for name, others in NOT_WITH.items():
            other = next((each for each in others if each in given), None)
            if name in given and other is not None:
                raise ValueError(
                    f"{name} is not for the loss with {other}, got both: leave out one of them"
                )
        if "scale" in given and self.similarity_loss == "cosine":
            raise ValueError(
                f"scale is not for similarity_loss cosine, got {self.scale}: leave it out"
            )

    def read(
        self, path: str | Path, train: TextPairs | SentenceEmbedder | None = None
    ) -> TextPairs:
        if train is None:  # a model that was trained on pairs may be measured on scores
            self._check_options_of_losses()
        highest, text = self.highest_similarity, self.text
        if highest is None and isinstance(train, TextPairs) and train.scores:
            highest = train.highest
        if train is None:
            self._warn_of_unread(path)
        elif self.teacher is None:
            text = self.columns_of_metrics(path)
        if train is not None and self.similarity is None:
            require_trec_eval()  # before the training
        return read_pairs(path, text, self.similarity, highest, self.quoting)

    def _warn_of_unread(self, path: str | Path) -> None:
        """Warn if only pairs are learnt, and the file also has a column of scores or of hard negatives."""
        _, columns = next(numbered_rows(path, self.text[:2], self.quoting))
        if self.similarity is not None or self.teacher is not None or len(self.text) == 3:
            return
        for name in columns:
            if name in SCORES:
                meaning = "so every pair counts as two texts with the same meaning"
                remedy = f"--similarity {name} to learn the scores"
            elif name in NEGATIVES:
                meaning = "so no pair has a hard negative"
                remedy = " ".join(f"-t {each}" for each in (*self.text, name))
            else:
                continue
            warnings.warn(
                f"{path} has a column {name!r}, which is not read, {meaning}: give {remedy}",
                stacklevel=3,
            )

    def describe_labels(self, data: TextPairs) -> str:
        return f"{self.similarity}: {number_range(data.scores)}" if data.scores else ""

    def options_to_keep(self, train: TextPairs) -> JsonObject:
        highest = {"highest_similarity": train.highest} if train.scores else {}
        kept = super().options_to_keep(train) | highest
        # Evaluation must not need the folders of the training's other models.
        only_now = ("guide", "teacher", "teacher_loss", "truncate_dim")
        return {name: value for name, value in kept.items() if name not in only_now}

    def model_options(self, train: TextPairs) -> JsonObject:
        names = ("pooling", "max_length", "matryoshka_layers", *EmbeddingLoss.__dataclass_fields__)
        options: JsonObject = {name: getattr(self, name) for name in names}
        given = {"query": self.query_prompt, "document": self.document_prompt}
        return {**options, "prompts": {k: v for k, v in given.items() if v is not None}}

    def metrics(self, data: TextPairs) -> tuple[str, ...]:
        return ("spearman", "pearson", "loss") if data.scores else (*METRICS, "recall@1", "loss")

    def encode(self, data: TextPairs, model: SentenceEmbedder) -> list[PairExample]:
        width = model.settings.width(model.config.output_size)
        if self.truncate_dim is not None and self.truncate_dim > width:
            raise ValueError(
                f"truncate_dim must be at most the vectors' width {width}, got {self.truncate_dim}: give less"
            )
        prompt_of = model.settings.prompt_of
        prompts = prompt_of(self.query_prompt, None), prompt_of(self.document_prompt, None)
        examples = encode_pairs(data, model.own_tokenizer(), self.room(model), prompts)
        if self.teacher is not None:
            scores = teacher_scores(self.teacher, data.texts)
            return [e._replace(teacher=row) for e, row in zip(examples, scores, strict=True)]
        if self.guide is not None:
            vectors = guide_vectors(self.guide, data.texts)
            return [e._replace(guide=rows) for e, rows in zip(examples, vectors, strict=True)]
        return examples

    def compared_part(self, example: PairExample) -> PairExample:
        return example._replace(teacher=None, guide=None)

    def collate(self, examples: Sequence[PairExample]) -> ModelArguments:
        return collate_pairs(examples, self.tokens_at_once)

    def decode(
        self,
        model: SentenceEmbedder,
        data: TextPairs,
        examples: Sequence[PairExample],
        logits: list[Tensor],
    ) -> Tensor:
        width = model.settings.width(model.config.output_size)
        return torch.stack(logits) if logits else torch.empty((0, 2, width))

    def similarities(self, predictions: Tensor) -> list[float]:
        """The cosine similarity of each text and its partner."""
        cut = self._cut(predictions)
        return F.cosine_similarity(cut[:, 0], cut[:, 1], dim=1).tolist()

    def _cut(self, predictions: Tensor) -> Tensor:
        return predictions[..., : self.truncate_dim]

    def score(
        self, model: SentenceEmbedder, data: TextPairs, predictions: Tensor
    ) -> dict[str, float]:
        if data.scores:
            return regression_metrics(self.similarities(predictions), data.scores)
        return retrieval_metrics(data.texts, self._cut(predictions))

    def room(self, model: SentenceEmbedder) -> int:
        limit = model.encoder.max_tokens
        return limit if self.max_length is None else min(self.max_length, limit)
