"""The task of named-entity recognition by spans of words; entities may be nested."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data import (
    EntityData,
    Sentence,
    SpanExample,
    collate_spans,
    encode_spans,
    read_entities,
    read_unlabelled,
)
from fastenc.data.columns import sentence_of
from fastenc.data.entities import is_nested, iterate_unlabelled
from fastenc.data.readers import in_parts
from fastenc.data.span_examples import spans_of
from fastenc.data.writers import json_lines
from fastenc.models import SpanClassifier
from fastenc.models.heads.span_classifier import check_span_options
from fastenc.packing import ModelArguments
from fastenc.tasks.base import Task
from fastenc.tasks.inference import Fill
from fastenc.tasks.metrics import entity_metrics
from fastenc.tasks.report import CLASSES, MISTAKES, Report, entity_figures
from fastenc.tasks.span_decoding import FoundEntity, best_null_offset, select_entities
from fastenc.tasks.summary import count_labels
from fastenc.text.tags import Span

DECODINGS = ("flat", "nested")


@dataclass(frozen=True)
class SpanNer(Task[SpanClassifier, EntityData, SpanExample, list[list[FoundEntity]]]):
    """Classifies every span of up to ``max_span_words`` words as one of the entity types or as no entity.

    Documents longer than ``max_length`` are read in overlapping windows. A span is learnt and predicted in the window
    in which it is most central. Predictions are a list of :class:`FoundEntity` for each sentence.

    With a dev set, ``null_offset`` is chosen on it after training, to give the highest F1, and stored in config.json.
    Raises: ValueError for an unknown value or a combination of options that is not supported.
    """

    name = "span-ner"
    model_class = SpanClassifier
    outputs = (".jsonl",)

    max_length: int = option(
        512, "Longest window in tokens; longer documents are read in several.", predict=True
    )
    word_column: int | None = option(
        None, "Column of the words, from 1. Default: 1; FORM in .conllu.", predict=True
    )
    tag_column: int | None = option(
        None,
        "Column of the entities' tags, from 1. Default: the last, or the one before --inner-tag-column.",
    )
    inner_tag_column: tuple[int, ...] | int | None = option(
        None,
        "Column of the tags of entities inside others, from 1, as in GermEval 2014; repeat it for each further level.",
    )
    representation: str = option(
        "boundary",
        "How a span is represented. boundary: its first and last word and the mean of its words. attention: the same "
        "with attention in place of the mean. biaffine: its first and last word, each through a separate network.",
    )
    span_size: int = option(150, "Width of the layers above the words' vectors.")
    max_span_words: int = option(10, "Longest entity in words; longer ones are missed.")
    length_embedding: bool = option(False, "Learn a vector for each length of a span.")
    decoding: str | None = option(
        None,
        "flat: entities share no words. nested: one may lie inside another. Default: nested if entities of the "
        "training set are.",
        predict=True,
    )
    null_offset: float | None = option(
        None,
        "How much an entity's score must be above that of no entity. A larger offset gives fewer, more probable "
        "entities. Default: the best value on the dev set.",
        predict=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A single column is stored as a number, as config.json and checkpoints have it.
        if isinstance(self.inner_tag_column, tuple) and len(self.inner_tag_column) < 2:
            object.__setattr__(self, "inner_tag_column", next(iter(self.inner_tag_column), None))
        check_span_options(
            self.representation, self.span_size, self.max_span_words, self.length_embedding
        )
        if self.decoding not in (None, *DECODINGS):
            raise ValueError(f"decoding must be one of {', '.join(DECODINGS)}, got {self.decoding}")

    def read(
        self, path: str | Path, train: EntityData | SpanClassifier | None = None
    ) -> EntityData:
        names = None if train is None else train.label_names
        return read_entities(path, self.word_column, self.tag_column, self.inner_tag_column, names)

    def read_inputs(self, path: str | Path) -> EntityData:
        return read_unlabelled(path, self.word_column)

    def input_parts(self, path: str | Path, size: int) -> Iterator[EntityData]:
        for sentences in in_parts(iterate_unlabelled(path, self.word_column), size):
            yield EntityData(sentences, [], [], str(path))

    def data_of(self, inputs: Sequence[object]) -> EntityData:
        """The data of texts, or of sentences as lists of words."""
        return EntityData([sentence_of(each, index) for index, each in enumerate(inputs)], [], [])

    def report(
        self, model: SpanClassifier, data: EntityData, predictions: list[list[FoundEntity]]
    ) -> Report:
        predicted_entities = [[each.entity for each in row] for row in predictions]
        wrong = (
            {
                "words": each.words,
                "missed": [entity for entity in truth if entity not in predicted],
                "wrong": [entity for entity in predicted if entity not in truth],
            }
            for each, truth, predicted in zip(
                data.sentences, data.entities, predicted_entities, strict=True
            )
            if set(truth) != set(predicted)
        )
        return {
            CLASSES: entity_figures(data.entities, predicted_entities),
            MISTAKES: json_lines(wrong),
        }

    def describe_labels(self, data: EntityData) -> str:
        return f"entities: {count_labels(each.type for row in data.entities for each in row)}"

    def metric_titles(self, model: SpanClassifier) -> dict[str, str]:
        return {"nested": "entities inside others", "nested_found": "of these found"}

    def model_options(self, train: EntityData) -> JsonObject:
        return {
            "label_names": train.label_names,
            "representation": self.representation,
            "span_size": self.span_size,
            "max_span_words": self.max_span_words,
            "length_embedding": self.length_embedding,
            "nested": any(map(is_nested, train.entities))
            if self.decoding is None
            else self.decoding == "nested",
            "null_offset": self.null_offset or 0.0,
        }

    def metrics(self, data: EntityData) -> tuple[str, ...]:
        return ("f1", "precision", "recall", "loss")

    def encode(self, data: EntityData, model: SpanClassifier) -> list[SpanExample]:
        names, longest = model.label_names, model.max_span_words
        return encode_spans(data, model.own_tokenizer(), self.room(model), names, longest)

    def collate(self, examples: Sequence[SpanExample]) -> ModelArguments:
        return collate_spans(examples)

    def logits_of(self, arguments: ModelArguments) -> list[int]:
        batch = arguments["batch"]
        rows = arguments["word_rows"][arguments["starts"]]
        sequences = torch.searchsorted(batch.cu_seqlens, rows, right=True) - 1
        return torch.bincount(sequences, minlength=batch.num_sequences).tolist()

    def decode(
        self, model, data: EntityData, examples: Sequence[SpanExample], logits: list[Tensor]
    ) -> list[list[FoundEntity]]:
        offset = model.null_offset if self.null_offset is None else self.null_offset
        return self._entities(model, data, examples, logits, offset, lowest=0.0)

    def score(
        self, model, data: EntityData, predictions: list[list[FoundEntity]]
    ) -> dict[str, float]:
        predicted = [[each.entity for each in row] for row in predictions]
        return entity_metrics(predicted, data.entities)

    def calibrate(
        self,
        model,
        data: EntityData,
        examples: Sequence[SpanExample],
        batch_size: int = 32,
        fill: Fill | None = None,
    ) -> dict[str, float]:
        if self.null_offset is not None:
            return {}
        logits, loss = self.compute(model, examples, batch_size, fill=fill)
        candidates = self.candidates(model, data, examples, logits)
        model.null_offset = best_null_offset(candidates, data.entities)
        scores = self.score(model, data, self.decode(model, data, examples, logits))
        return {"loss": loss, **scores, "null_offset": model.null_offset}

    def candidates(
        self, model, data: EntityData, examples: Sequence[SpanExample], logits: list[Tensor]
    ) -> list[list[FoundEntity]]:
        """The entities of each sentence if every span counted as an entity, whatever its margin."""
        return self._entities(model, data, examples, logits, 0.0, lowest=float("-inf"))

    def lines(
        self, model, data: EntityData, predictions: list[list[FoundEntity]], suffix: str
    ) -> Iterable[str]:
        return json_lines([_row(*pair) for pair in zip(data.sentences, predictions, strict=True)])

    def _entities(
        self,
        model: SpanClassifier,
        data: EntityData,
        examples: Sequence[SpanExample],
        logits: list[Tensor],
        null_offset: float,
        lowest: float,
    ) -> list[list[FoundEntity]]:
        """The entities of each sentence that are selected from the spans with a margin above ``lowest``."""
        candidates: list[list[FoundEntity]] = [[] for _ in data.sentences]
        for example, values in zip(examples, logits, strict=True):
            kinds, margins, probabilities = model.decide(values, null_offset)
            above = margins > lowest
            columns = (*spans_of(example), kinds, probabilities, margins)
            rows = zip(*(column[above].tolist() for column in columns), strict=True)
            candidates[example.sentence] += [
                FoundEntity(
                    Span(model.label_names[entity_type], first, last + 1), probability, margin
                )
                for first, last, entity_type, probability, margin in rows
            ]
        nested = model.nested if self.decoding is None else self.decoding == "nested"
        return [select_entities(row, nested=nested) for row in candidates]


def _row(each: Sentence, predicted: list[FoundEntity]) -> dict[str, object]:
    """A sentence as a JSON row. An entity has the characters [start, end) and the words [first_word, end_word)."""
    entities = []
    for (entity_type, first, stop), probability, _ in predicted:
        start, end = each.starts[first], each.starts[stop - 1] + len(each.words[stop - 1])
        entities.append(
            {
                "type": entity_type,
                "text": each.text[start:end],
                "start": start,
                "end": end,
                "first_word": first,
                "end_word": stop,
                "probability": round(probability, 6),
            }
        )
    return {"text": each.text, "words": each.words, "entities": entities}
