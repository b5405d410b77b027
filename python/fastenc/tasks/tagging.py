"""The task of token classification: a tag for each word, such as parts of speech and named entities."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data import (
    Sentence,
    TaggedData,
    TaggingExample,
    collate_tagging,
    encode_tagged,
    read_tagged,
    read_words,
)
from fastenc.data.columns import iterate_words, sentence_of
from fastenc.data.readers import in_parts
from fastenc.data.tagging import LABEL_SCHEMES
from fastenc.data.writers import json_lines
from fastenc.models import TokenClassifier
from fastenc.packing import ModelArguments
from fastenc.tasks.base import Task
from fastenc.tasks.metrics import tagging_metrics
from fastenc.tasks.report import (
    CLASSES,
    CONFUSION,
    MISTAKES,
    Report,
    class_figures,
    confusion_matrix,
    entity_figures,
)
from fastenc.tasks.summary import count_labels
from fastenc.text.tags import SCHEMES, scheme_of, spans

AGGREGATIONS = ("first", "mean")


class Tagging(NamedTuple):
    """A sentence's predicted tags and their probabilities, one for each word."""

    tags: list[str]
    confidences: list[float]


@dataclass(frozen=True)
class TokenClassification(Task[TokenClassifier, TaggedData, TaggingExample, list[Tagging]]):
    """A tag for every word of a sentence, whatever the number of the word's tokens.

    Documents longer than ``max_length`` are read in overlapping windows. The logits of a token come from the window in
    which it is most central. Predictions are a :class:`Tagging` for each sentence.
    Raises: ValueError for an unknown value, or for a CRF with a ``label_scheme`` or ``aggregation`` other than "first".
    """

    name = "token-classification"
    model_class = TokenClassifier
    per_token = True
    headed = ()

    max_length: int = option(
        512, "Longest window in tokens; longer documents are read in several.", predict=True
    )
    word_column: int | None = option(
        None, "Column of the words, from 1. Default: 1; FORM in .conllu.", predict=True
    )
    tag_column: int | None = option(
        None, "Column of the tags, from 1. Default: the last; UPOS in .conllu."
    )
    tag_scheme: str | None = option(
        None, "Convert entity tags to this scheme: iob2 or bioes. Default: tags are not converted."
    )
    label_scheme: str = option(
        "first", "Which subwords of a word are trained to predict its tag: first or all."
    )
    aggregation: str = option(
        "first",
        "What a word's tag is predicted from: first (its first subword), or mean (its subwords' mean probabilities).",
        predict=True,
    )
    crf: bool = option(
        False,
        "Add a linear-chain CRF; it predicts only sequences of tags that the tag scheme allows.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("tag_scheme", (None, *SCHEMES)),
            ("label_scheme", LABEL_SCHEMES),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(filter(None, known))}, got {getattr(self, name)}"
                )
        if self.crf:
            self._check_crf()

    def read(
        self, path: str | Path, train: TaggedData | TokenClassifier | None = None
    ) -> TaggedData:
        names = None if train is None else train.label_names
        data = read_tagged(path, self.word_column, self.tag_column, names, self.tag_scheme)
        if train is None and len(data.label_names) == 1:
            raise ValueError(
                f"{path}: there must be at least two different tags to learn, got {data.label_names[0]!r} for every "
                "word: give tag_column another column, or add sentences with other tags"
            )
        return data

    def data_of(self, inputs: Sequence[object]) -> TaggedData:
        """The data of texts, or of sentences as lists of words."""
        return TaggedData([sentence_of(each, index) for index, each in enumerate(inputs)], [])

    def report(
        self, model: TokenClassifier, data: TaggedData, predictions: list[Tagging]
    ) -> Report:
        pairs = list(zip(data.sentences, predictions, strict=True))
        index = {name: i for i, name in enumerate(model.label_names)}
        gold = [index[tag] for each, _ in pairs for tag in each.tags]
        predicted_tags = [index[tag] for _, predicted in pairs for tag in predicted.tags]
        wrong = (
            {"line": each.lines[0], "words": each.words, "true": each.tags, "tags": predicted.tags}
            for each, predicted in pairs
            if each.tags != predicted.tags
        )
        if scheme_of(model.label_names) is None:
            figures = class_figures(gold, predicted_tags, model.label_names)
        else:
            figures = entity_figures(
                [spans(each.tags) for each, _ in pairs], [spans(p.tags) for _, p in pairs]
            )
        matrix = confusion_matrix(gold, predicted_tags, model.label_names)
        return {CLASSES: figures, CONFUSION: matrix, MISTAKES: json_lines(wrong)}

    def describe_labels(self, data: TaggedData) -> str:
        return f"tags: {count_labels(tag for each in data.sentences for tag in each.tags)}"

    def metric_titles(self, model: TokenClassifier) -> dict[str, str]:
        return {name: f"{name} of whole entities" for name in ("f1", "precision", "recall")}

    def read_inputs(self, path: str | Path) -> TaggedData:
        return read_words(path, self.word_column)

    def input_parts(self, path: str | Path, size: int) -> Iterator[TaggedData]:
        for sentences in in_parts(iterate_words(path, self.word_column), size):
            yield TaggedData(sentences, [], str(path))

    def model_options(self, train: TaggedData) -> JsonObject:
        return {"label_names": train.label_names, "crf": self.crf}

    def metrics(self, data: TaggedData) -> tuple[str, ...]:
        entities = scheme_of(data.label_names) is not None
        return (*(("f1", "precision", "recall") if entities else ()), "accuracy", "loss")

    def encode(self, data: TaggedData, model: TokenClassifier) -> list[TaggingExample]:
        names = model.label_names
        return encode_tagged(
            data, model.own_tokenizer(), self.room(model), names, self.label_scheme
        )

    def collate(self, examples: Sequence[TaggingExample]) -> ModelArguments:
        return collate_tagging(examples)

    def decode(
        self,
        model: TokenClassifier,
        data: TaggedData,
        examples: Sequence[TaggingExample],
        logits: list[Tensor],
    ) -> list[Tagging]:
        if model.crf is not None:
            self._check_crf()
        if not data.sentences:
            return []
        tokens: list[list[Tensor]] = [[] for _ in data.sentences]
        words: list[list[int]] = [[] for _ in data.sentences]
        for example, values in zip(examples, logits, strict=True):
            owned = values[example.first : example.first + len(example.word_ids)]
            tokens[example.sentence].append(owned)
            words[example.sentence] += example.word_ids
        emissions = [self._of_words(torch.cat(t), w) for t, w in zip(tokens, words, strict=True)]
        counts = [len(of_sentence) for of_sentence in emissions]
        cu_words = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        device = next(model.parameters()).device
        decoded = model.decode(torch.cat(emissions).to(device), cu_words.to(device))
        tags, probabilities = (values.cpu().split(counts) for values in decoded)
        names = model.label_names
        return [
            Tagging([names[tag] for tag in y.tolist()], p.tolist())
            for y, p in zip(tags, probabilities, strict=True)
        ]

    def score(
        self, model: TokenClassifier, data: TaggedData, predictions: list[Tagging]
    ) -> dict[str, float]:
        gold = [each.tags for each in data.sentences]
        entities = scheme_of(model.label_names) is not None
        return tagging_metrics([p.tags for p in predictions], gold, entities=entities)

    def lines(
        self, model: TokenClassifier, data: TaggedData, predictions: list[Tagging], suffix: str
    ) -> Iterable[str]:
        pairs = list(zip(data.sentences, predictions, strict=True))
        if suffix == ".tsv":
            return _columns(pairs)
        entities = scheme_of(model.label_names) is not None
        return json_lines([_row(each, predicted, entities) for each, predicted in pairs])

    def _of_words(self, logits: Tensor, word_ids: list[int]) -> Tensor:
        """Logits of words from logits of tokens: (tokens, labels) → (words, labels).

        With the aggregation "mean" these are the logarithms of mean probabilities.
        """
        words = torch.tensor(word_ids, dtype=torch.int64)
        begins = torch.ones_like(words, dtype=torch.bool)
        begins[1:] = words[1:] != words[:-1]
        if self.aggregation == "first":
            return logits[begins]
        sizes = begins.nonzero().flatten().diff(append=torch.tensor([len(words)]))
        return torch.segment_reduce(logits.softmax(1), "mean", lengths=sizes, axis=0).log()

    def _check_crf(self) -> None:
        for name in ("label_scheme", "aggregation"):
            if getattr(self, name) != "first":
                raise ValueError(
                    f"{name} must be first with a CRF, whose chain has one subword of each word, got "
                    f"{getattr(self, name)}: leave it out"
                )


def _columns(pairs: Iterable[tuple[Sentence, Tagging]]) -> Iterator[str]:
    """Lines with a word and its tag, and an empty line after each sentence."""
    for each, predicted in pairs:
        yield from (f"{word}\t{tag}" for word, tag in zip(each.words, predicted.tags, strict=True))
        yield ""


def _row(each: Sentence, predicted: Tagging, with_entities: bool) -> dict[str, object]:
    """A sentence as a JSON row.

    An entity has the characters [start, end) of the text. Its confidence is the mean over its words.
    """
    ends = [start + len(word) for start, word in zip(each.starts, each.words, strict=True)]
    row: dict[str, object] = {
        "text": each.text,
        "words": each.words,
        "tags": predicted.tags,
        "confidences": [round(p, 6) for p in predicted.confidences],
    }
    if with_entities:
        row["entities"] = [
            {
                "type": entity_type,
                "text": each.text[each.starts[first] : ends[stop - 1]],
                "start": each.starts[first],
                "end": ends[stop - 1],
                "confidence": round(sum(predicted.confidences[first:stop]) / (stop - first), 6),
            }
            for entity_type, first, stop in spans(predicted.tags)
        ]
    return row
