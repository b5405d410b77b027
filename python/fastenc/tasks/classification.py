"""Classification of texts and pairs of texts, with one label or several, and regression."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data import (
    ClassificationExample,
    LabelledData,
    collate_classification,
    encode_labelled,
    read_inputs,
    read_labelled,
)
from fastenc.data.readers import in_parts, iterate_inputs
from fastenc.data.writers import json_lines, table_lines
from fastenc.models import SequenceClassifier
from fastenc.packing import ModelArguments
from fastenc.tasks.base import Task
from fastenc.tasks.metrics import (
    classification_metrics,
    multi_label_metrics,
    regression_metrics,
)
from fastenc.tasks.report import (
    CLASSES,
    CONFUSION,
    MISTAKES,
    Report,
    class_figures,
    confusion_matrix,
)
from fastenc.tasks.shared_options import QUOTING
from fastenc.tasks.summary import count_labels, number_range
from fastenc.text import LongTexts

FROM_CHECKPOINT = " In prediction: as in training."
NO_CLASSES = "a regression has no classes to report on: leave out the report"
CHUNKED_BATCH_TOKENS = 16_384  # as many as 32 sequences of 512, a full batch of truncated texts

METRICS = {
    "single_label_classification": ("accuracy", "f1", "mcc", "loss"),
    "regression": ("pearson", "spearman", "loss"),
    "multi_label_classification": ("micro_f1", "macro_f1", "accuracy", "loss"),
}


@dataclass(frozen=True)
class SequenceClassification(Task[SequenceClassifier, LabelledData, ClassificationExample, Tensor]):
    """One label, any number of labels (multi-label), or a number (regression) for a text or a pair of texts.

    Predictions are logits: float32 (texts, labels). For multi-label, labels with a probability of 0.5 or more are
    predicted.

    Texts that are too long are truncated, or read in chunks whose vectors the model aggregates
    (:class:`fastenc.text.LongTexts`). Options of long texts that are left out have the defaults of LongTexts in
    training. In prediction they have the values of the training.
    Raises: ValueError if regression and multi_label are both given, and as LongTexts.
    """

    name = "sequence-classification"
    model_class = SequenceClassifier
    reads_first_token = True

    max_length: int | None = option(
        None,
        f"Longest sequence in tokens. Default: {LongTexts.max_length}.{FROM_CHECKPOINT}",
        predict=True,
    )
    text: tuple[str, ...] = option(
        ("sentence",), "Column of the text; give it twice for pairs of texts.", "-t", predict=True
    )
    label: str = option("label", "Column of the label.")
    quoting: str | None = option(None, QUOTING, predict=True)
    regression: bool = option(False, "The labels are numbers to predict.")
    multi_label: bool = option(
        False, "A text has any number of labels, separated by commas, or as a list in JSON."
    )
    truncation: str | None = option(
        None,
        f"Which tokens of a longer text are kept: head, tail or head+tail. Default: {LongTexts.truncation}."
        f"{FROM_CHECKPOINT}",
        predict=True,
    )
    chunks: str | None = option(
        None,
        "Read longer texts in chunks. How the chunks' vectors become one: mean, max, attention (learnt weights) or "
        "transformer.",
    )
    stride: int | None = option(
        None,
        f"Number of tokens that neighbouring chunks share. Default: {LongTexts.stride}.{FROM_CHECKPOINT}",
        predict=True,
    )
    max_chunks: int | None = option(
        None,
        "Largest number of chunks of a text; longer texts are cut by --truncation first. "
        f"Default: {LongTexts.max_chunks}.{FROM_CHECKPOINT}",
        predict=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.multi_label:
            raise ValueError("multi_label excludes regression, got both: give one")
        if len(self.text) not in (1, 2):
            raise ValueError(
                f"text must name one column, or two of pairs, got {', '.join(self.text) or 'none'}: "
                "give -t once or twice"
            )
        self.long_texts()

    @property
    def problem_type(self) -> str:
        """transformers' name of the kind of labels."""
        kinds = {self.regression: "regression", self.multi_label: "multi_label_classification"}
        return kinds.get(True, "single_label_classification")

    def read(
        self, path: str | Path, train: LabelledData | SequenceClassifier | None = None
    ) -> LabelledData:
        names = None if train is None else train.label_names
        kinds = dict(regression=self.regression, multi_label=self.multi_label)
        data = read_labelled(path, self.text, self.label, names, **kinds, quoting=self.quoting)
        if train is None and self.problem_type == "single_label_classification":
            _check_classes(path, data)
        return data

    def read_inputs(self, path: str | Path) -> LabelledData:
        return LabelledData(read_inputs(path, self.text, self.quoting), [], [])

    def input_parts(self, path: str | Path, size: int) -> Iterator[LabelledData]:
        for texts in in_parts(iterate_inputs(path, self.text, self.quoting), size):
            yield LabelledData(texts, [], [])

    def model_options(self, train: LabelledData) -> JsonObject:
        labels = {"num_labels": 1} if self.regression else {"label_names": train.label_names}
        long_texts = self.long_texts()
        self._check_chunked(long_texts)
        return {**labels, "problem_type": self.problem_type, "long_texts": asdict(long_texts)}

    @classmethod
    def options_kept(cls, hf_config: JsonObject) -> JsonObject:
        problem_type = hf_config.get("problem_type")  # transformers writes it in training
        if problem_type is None and len(cast(JsonObject, hf_config.get("id2label") or {})) == 1:
            problem_type = "regression"  # as SequenceClassifier and transformers take it
        from_kind = {
            "regression": problem_type == "regression",
            "multi_label": problem_type == "multi_label_classification",
        }
        return from_kind | super().options_kept(hf_config)

    def data_of(self, inputs: Sequence[object]) -> LabelledData:
        """The data of texts, or of pairs of texts."""
        texts = [tuple(each) if isinstance(each, list | tuple) else each for each in inputs]
        for index, each in enumerate(texts):
            columns = each if isinstance(each, tuple) else (each,)
            if len(columns) != len(self.text) or not all(isinstance(x, str) for x in columns):
                expected = "a text" if len(self.text) == 1 else "a pair of texts"
                raise ValueError(f"input {index} must be {expected}, got {each!r}")
        return LabelledData(cast(list[str], texts), [], [])

    def check_report(self) -> None:
        if self.regression:
            raise ValueError(NO_CLASSES)

    def report(self, model: SequenceClassifier, data: LabelledData, predictions: Tensor) -> Report:
        if model.problem_type == "regression":  # of a caller who has not asked check_report
            raise ValueError(NO_CLASSES)
        several = model.problem_type == "multi_label_classification"
        names, rows, labels = model.label_names, _rows(model, predictions), cast(Any, data.labels)
        if several:
            predicted: Any = (predictions >= 0).long().tolist()
            gold: Any = [[int(value) for value in row] for row in labels]
            title = lambda row: [n for n, one in zip(names, row, strict=True) if one]
        else:
            predicted, gold, title = predictions.argmax(1).tolist(), list(labels), names.__getitem__
        wrong = (
            {"where": where, **self._texts(text), "true": title(y), **row}
            for where, text, y, p, row in zip(
                data.where or range(1, len(data) + 1),
                data.texts,
                gold,
                predicted,
                rows,
                strict=True,
            )
            if y != p
        )
        files: Report = {
            CLASSES: class_figures(gold, predicted, names),
            MISTAKES: json_lines(wrong),
        }
        return files if several else {**files, CONFUSION: confusion_matrix(gold, predicted, names)}

    def describe_labels(self, data: LabelledData) -> str:
        if self.regression:
            return f"{self.label}: {number_range(data.labels)}"  # type: ignore[arg-type]
        if self.multi_label:
            rows: Any = data.labels
            labels = (
                n for row in rows for n, one in zip(data.label_names, row, strict=True) if one
            )
            return f"{self.label}: {count_labels(labels)}"
        classes: Any = data.labels
        return f"{self.label}: {count_labels(data.label_names[i] for i in classes)}"

    def metric_titles(self, model: SequenceClassifier) -> dict[str, str]:
        if model.problem_type != "single_label_classification":
            return {}
        two = len(model.label_names) == 2
        return {"f1": f"f1 of {model.label_names[1]}" if two else "f1 (mean of the classes)"}

    def metrics(self, data: LabelledData) -> tuple[str, ...]:
        return METRICS[self.problem_type]

    def encode(self, data: LabelledData, model: SequenceClassifier) -> list[ClassificationExample]:
        _check_pairs(data, cast("list[str] | None", model.task_options.get("text")))
        kept = model.long_texts
        if self.chunks not in (None, kept.chunks):
            raise ValueError(
                f"chunks must be {kept.chunks}, as the model was trained with, got {self.chunks}: leave it out, or "
                "load the model with the task and a training set"
            )
        long_texts = replace(kept, **self._given())
        self._check_chunked(long_texts)
        length = min(long_texts.max_length, model.positions)
        examples = encode_labelled(data, model.own_tokenizer(), length, long_texts)
        if long_texts.chunks == "transformer":
            _check_positions(examples, kept.max_chunks)
        return examples

    def batch_tokens(self) -> int | None:
        return None if self.chunks is None else CHUNKED_BATCH_TOKENS

    def collate(self, examples: Sequence[ClassificationExample]) -> ModelArguments:
        return collate_classification(examples)

    def decode(
        self,
        model: SequenceClassifier,
        data: LabelledData,
        examples: Sequence[ClassificationExample],
        logits: list[Tensor],
    ) -> Tensor:
        return _stacked(logits, model)

    def score(
        self, model: SequenceClassifier, data: LabelledData, predictions: Tensor
    ) -> dict[str, float]:
        return _score(model, predictions, data.labels)

    def lines(
        self, model: SequenceClassifier, data: LabelledData, predictions: Tensor, suffix: str
    ) -> Iterable[str]:
        rows = _rows(model, predictions)
        if suffix == ".tsv":
            # The texts are left out, because they may contain tabs and line breaks. Line n belongs to input n.
            return table_lines(rows)
        named = zip(data.texts, rows, strict=True)
        return json_lines([{**self._texts(text), **row} for text, row in named])

    def _texts(self, text: Sequence[str]) -> dict[str, str]:
        """{column: text} of a text or a pair."""
        return dict(zip(self.text, (text,) if isinstance(text, str) else text, strict=False))

    def long_texts(self) -> LongTexts:
        """How training reads long texts: the options that were given, and the defaults for the others."""
        return LongTexts(**self._given())

    def _given(self) -> dict[str, Any]:
        """The options of LongTexts that were given."""
        values = {name: getattr(self, name) for name in LongTexts.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}

    def _check_chunked(self, long_texts: LongTexts) -> None:
        for name in ("stride", "max_chunks"):
            if long_texts.chunks is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is an option of chunks, got {getattr(self, name)} without chunks: leave it out, or train "
                    "with chunks"
                )


def _check_classes(path: str | Path, data: LabelledData) -> None:
    """Raises: ValueError if the labels look like numbers to predict: some are fractions, or most occur only once."""
    try:
        numbers = [float(name) for name in data.label_names]
    except ValueError:
        return
    whole = all(number.is_integer() for number in numbers)
    if whole and 2 * len(numbers) <= len(data):
        return
    raise ValueError(
        f"{path}: the labels are {len(numbers)} different numbers in {len(data)} rows, such as {data.label_names[0]} "
        f"and {data.label_names[-1]}: give regression=True to predict numbers, or use words as names of the classes"
    )


def _check_pairs(data: LabelledData, columns: list[str] | None) -> None:
    """Raises: ValueError if the model was trained on pairs and gets single texts, or the other way round.

    ``columns``: the columns that the model was trained on; None if they are unknown.
    """
    if columns is None or not data.texts:
        return
    pairs = isinstance(data.texts[0], tuple)
    if pairs != (len(columns) == 2):
        kinds = {True: "pairs of texts", False: "single texts"}
        raise ValueError(
            f"the model was trained on {kinds[not pairs]} (of {' and '.join(columns)}), got {kinds[pairs]}: give -t "
            f"{'once' if pairs else 'twice'}, for the {'column' if pairs else 'columns of a table'} that correspond"
            f"{'s' if pairs else ''} to them"
        )


def _check_positions(examples: Sequence[ClassificationExample], positions: int) -> None:
    for number, example in enumerate(examples, start=1):
        if len(example.chunk_lengths or ()) > positions:
            raise ValueError(
                f"a text must have at most {positions} chunks, the positions of the model's transformer, got "
                f"{len(example.chunk_lengths or ())} for text {number} of {len(examples)}: give max_chunks of "
                f"{positions} or less"
            )


def _stacked(logits: list[Tensor], model: SequenceClassifier) -> Tensor:
    return torch.stack(logits) if logits else torch.empty((0, len(model.label_names)))


def _score(model: SequenceClassifier, logits: Tensor, labels: Sequence[Any]) -> dict[str, float]:
    if model.problem_type == "regression":
        return regression_metrics(logits[:, 0].tolist(), labels)
    if model.problem_type == "multi_label_classification":
        return multi_label_metrics((logits >= 0).tolist(), labels)
    return classification_metrics(logits.argmax(1).tolist(), labels, logits.shape[1])


def _rows(model: SequenceClassifier, logits: Tensor) -> list[dict[str, object]]:
    """The prediction for each text as {column: value} of the output file."""
    if model.problem_type == "regression":
        return [{"prediction": value} for value in logits[:, 0].tolist()]
    several = model.problem_type == "multi_label_classification"
    rows = []
    for probabilities in (logits.sigmoid() if several else logits.softmax(1)).tolist():
        named = dict(zip(model.label_names, probabilities, strict=True))
        if several:
            row: dict[str, object] = {"labels": [name for name, p in named.items() if p >= 0.5]}
        else:
            row = {"label": max(named, key=named.__getitem__)}
        rows.append(row | {f"p({name})": p for name, p in named.items()})
    return rows
