"""The base class of tasks: what fine-tuning, evaluation and prediction need between files and a model."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives.loss_terms import labelled_items
from fastenc.packing import ModelArguments
from fastenc.tasks.inference import Fill, TokenSequence, run_model
from fastenc.tasks.report import Report

MIX = "mix"

Model = TypeVar("Model", bound=PretrainedModel)
Data = TypeVar("Data", bound=Sized)
Example = TypeVar("Example", bound=TokenSequence)
Predictions = TypeVar("Predictions")


@dataclass(frozen=True)
class Task(ABC, Generic[Model, Data, Example, Predictions]):
    """One task. A subclass is a frozen dataclass whose fields are the task's options.

    In the methods, ``data`` is what the task's reader returns: a set of items, such as texts. ``examples`` are token
    sequences ready for the model, each with ``input_ids``. An item has one or several examples.

    Class attributes:
        name: value of ``fastenc finetune --task``.
        model_class: class of the model. A checkpoint of this task is recognised by its ``architecture``.
        per_token: True if the logits have a row for every token, False if they have one for every sequence.
        trains_by_steps: True if the model is trained by gradient steps, False if :meth:`fit` computes it.
        reads_first_token: True if the head reads only the first token of each sequence (or the pooler's output), so
            that cached features need no other tokens.
        outputs: suffixes of the files to which predictions can be written.
        headed: the suffixes in ``outputs`` whose files have a header line.
    """

    name: ClassVar[str]
    model_class: ClassVar[type[PretrainedModel]]
    per_token: ClassVar[bool] = False
    trains_by_steps: ClassVar[bool] = True
    reads_first_token: ClassVar[bool] = False
    outputs: ClassVar[tuple[str, ...]] = (".tsv", ".jsonl")
    headed: ClassVar[tuple[str, ...]] = (".tsv",)

    max_length: int | None = option(
        128, "Longest input in tokens; longer ones are cut.", predict=True
    )
    layers: str | None = option(
        None,
        "mix: the head reads a learned weighted sum of the outputs of the embeddings and of all layers instead of the "
        "last layer's output. Default: as in the checkpoint.",
    )

    def __post_init__(self) -> None:
        if self.layers not in (None, MIX):
            raise ValueError(
                f"layers must be {MIX}, or left out, got {self.layers!r}: leave it out"
            )
        if self.layers == MIX and not self.trains_by_steps:
            raise ValueError(
                f'{self.name} cannot train a weighted sum of layers, got layers="{MIX}": leave it out'
            )

    @abstractmethod
    def read(self, path: str | Path, train: Data | Model | None = None) -> Data:
        """Read labelled data.

        Args:
            train: the training set, or the model that was trained on it, which gives the label names; None if this is
                the training set.
        Raises: ValueError with file, line and remedy.
        """

    @abstractmethod
    def read_inputs(self, path: str | Path) -> Data:
        """Read data without labels, to predict for."""

    def input_parts(self, path: str | Path, size: int) -> Iterator[Data]:
        """The data of :meth:`read_inputs` in parts of ``size`` items, each of which is read when it is needed.

        A task whose files can only be read as a whole yields one part.
        """
        yield self.read_inputs(path)

    @abstractmethod
    def model_options(self, train: Data) -> JsonObject:
        """Options of ``model_class.from_pretrained`` for a head that fits the training set, as JSON values."""

    @abstractmethod
    def metrics(self, data: Data) -> tuple[str, ...]:
        """Names of the metrics of labelled data. The first one chooses the best checkpoint.

        "loss" is among them if the data have what the loss reads.
        """

    @abstractmethod
    def encode(self, data: Data, model: Model) -> list[Example]:
        """The examples of the data, with labels if the data have labels."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> ModelArguments:
        """The model's arguments: ``batch`` (a PackedBatch) and, for labelled examples, ``labels``."""

    def collate_step(self, examples: Sequence[Example], step: int) -> ModelArguments:
        """:meth:`collate` for a training batch; ``step`` counts them. For what changes in the course of a training."""
        return self.collate(examples)

    @abstractmethod
    def decode(
        self, model: Model, data: Data, examples: Sequence[Example], logits: list[Tensor]
    ) -> Predictions:
        """Predictions for the items of the data, from the logits of each example (see :meth:`compute`)."""

    @abstractmethod
    def score(self, model: Model, data: Data, predictions: Predictions) -> dict[str, float]:
        """The metrics of predictions for labelled data, except the loss."""

    @abstractmethod
    def lines(
        self, model: Model, data: Data, predictions: Predictions, suffix: str
    ) -> Iterable[str]:
        """The lines of a file of predictions that ends in ``suffix``, one of ``outputs``."""

    def data_of(self, inputs: Sequence[object]) -> Data:
        """The data of inputs given in Python, such as texts; :meth:`read_inputs` does the same for a file.

        Raises: ValueError for inputs of a wrong type.
        """
        raise ValueError(
            f"{self.name} predicts for files only, got inputs from Python: write them to a file, for fastenc predict"
        )

    def check_report(self) -> None:
        """Raises: ValueError if there are no classes to report on, before any work."""
        if type(self).report is Task.report:
            raise ValueError(f"{self.name} has no classes to report on: leave out the report")

    def report(self, model: Model, data: Data, predictions: Predictions) -> "Report":
        """Files about predictions for labelled data: metrics of each class, a confusion matrix, the mistakes.

        Raises: ValueError if the task has no classes.
        """
        raise ValueError(f"{self.name} has no classes to report on: leave out the report")

    def describe_labels(self, data: Data) -> str:
        """A text with the labels of a data set and the number of each; "" for a task without such labels."""
        return ""

    def metric_titles(self, model: Model) -> dict[str, str]:
        """{metric: title} of the metrics whose name alone does not say what they measure."""
        return {}

    def check_max_length(self, model: Model) -> None:
        """Raises: ValueError if ``max_length`` is above the model's number of positions."""
        if self.max_length is not None and self.max_length > self.room(model):
            raise ValueError(
                f"max_length must be at most {self.room(model)}, the model's number of positions, got "
                f"{self.max_length}: give less"
            )

    def load(
        self,
        name: str | Path,
        train: Data | None = None,
        dtype: torch.dtype | str = torch.float32,
    ) -> Model:
        """The model of a checkpoint.

        Args:
            name: folder, or name on the hub.
            train: training set for which a new head is made; None: the checkpoint's head is loaded.
            dtype: as :meth:`fastenc.Encoder.from_pretrained` takes it.
        Raises: ValueError for a checkpoint of another task, or without a tokenizer.
        """
        options: dict[str, Any] = {} if train is None else {**self.model_options(train)}
        if self.layers == MIX:
            options["layer_mix"] = True
        model = self.model_class.from_pretrained(name, dtype=dtype, **options)
        if model.tokenizer is None:
            raise ValueError(
                f"{name} must have a tokenizer.json, got none: add the tokenizer that it was trained with"
            )
        return cast(Model, model)

    def options_to_keep(self, train: Data) -> JsonObject:
        """The options that are stored in the model's config.json, so that prediction and evaluation use them too."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def options_kept(cls, hf_config: JsonObject) -> JsonObject:
        """The options stored in a config.json, without those that this version does not know."""
        known = {field.name for field in fields(cls)}
        kept = cast(JsonObject, hf_config.get("task_options") or {})
        return {name: value for name, value in kept.items() if name in known}

    def predict(
        self, model: Model, data: Data, batch_size: int = 32, show_progress: bool | None = False
    ) -> Predictions:
        """Predictions for the items of the data, in their order."""
        examples = self.encode(data, model)
        return self.predict_encoded(model, data, examples, batch_size, show_progress)

    def predict_encoded(
        self,
        model: Model,
        data: Data,
        examples: Sequence[Example],
        batch_size: int = 32,
        show_progress: bool | None = False,
    ) -> Predictions:
        """:meth:`predict` for data whose ``examples`` are those of :meth:`encode`."""
        results, _ = self.compute(model, examples, batch_size, show_progress)
        return self.decode(model, data, examples, results)

    def evaluate(
        self,
        model: Model,
        data: Data,
        examples: Sequence[Example],
        batch_size: int = 32,
        fill: Fill | None = None,
        show_progress: bool | None = False,
    ) -> dict[str, float]:
        """The metrics of labelled data.

        Args:
            examples: those of :meth:`encode`.
            fill: see :func:`fastenc.tasks.inference.run_model`.
        """
        metrics, _ = self.measure(model, data, examples, batch_size, fill, show_progress)
        return metrics

    def measure(
        self,
        model: Model,
        data: Data,
        examples: Sequence[Example],
        batch_size: int = 32,
        fill: Fill | None = None,
        show_progress: bool | None = False,
    ) -> tuple[dict[str, float], Predictions]:
        """The metrics of :meth:`evaluate`, and the predictions that they measure. Arguments as there."""
        results, loss = self.compute(model, examples, batch_size, show_progress, fill)
        predictions = self.decode(model, data, examples, results)
        of_loss = {"loss": loss} if "loss" in self.metrics(data) else {}
        return {**of_loss, **self.score(model, data, predictions)}, predictions

    def compute(
        self,
        model: Model,
        examples: Sequence[Example],
        batch_size: int = 32,
        show_progress: bool | None = False,
        fill: Fill | None = None,
    ) -> tuple[list[Tensor], float]:
        """(what :meth:`decode` reads of each example, mean loss).

        By default it reads the logits, see :func:`fastenc.tasks.inference.run_model`.
        """
        return run_model(
            model,
            examples,
            self.collate,
            self.logits_of,
            batch_size,
            show_progress,
            fill=fill,
            loss_items=self.loss_items,
            keep=self.keep,
        )

    def calibrate(
        self,
        model: Model,
        data: Data,
        examples: Sequence[Example],
        batch_size: int = 32,
        fill: Fill | None = None,
    ) -> dict[str, float]:
        """Choose values that the model stores beside its weights, such as a threshold, on held-out data.

        It is called once, after training.
        Returns: the metrics as :meth:`evaluate`, and the chosen values; {} if the task has nothing to choose.
        """
        return {}

    def fit(
        self,
        model: Model,
        train: Data,
        dev: Data | None,
        batch_size: int = 32,
        show_progress: bool | None = None,
        metric: str | None = None,
    ) -> dict[str, float]:
        """Compute the model from the training set, for a task with ``trains_by_steps=False``.

        Args:
            dev: data that choose between several models; None: there is nothing to choose.
            metric: the metric of ``dev`` that chooses; None: the first of ``metrics``.
        Returns: the metrics of the dev set; {} if ``dev`` is None.
        """
        raise NotImplementedError

    def logits_of(self, arguments: ModelArguments) -> list[int] | None:
        """Number of rows of a batch's logits that belong to each example; None if each example has one row.

        Args:
            arguments: of :meth:`collate`.
        """
        return arguments["batch"].cu_seqlens.diff().tolist() if self.per_token else None

    def loss_items(self, arguments: ModelArguments) -> int:
        """The number of items of a batch that the loss is a mean over, counted on the host.

        Args:
            arguments: of :meth:`collate`, with labels.
        """
        return labelled_items(arguments["labels"])

    def keep(self, logits: Tensor) -> Tensor:
        """What evaluation and prediction keep of a batch's logits until :meth:`decode` reads them."""
        return logits.float()

    def room(self, model: Model) -> int:
        """Largest number of tokens of a sequence, special tokens included."""
        positions = model.positions
        return positions if self.max_length is None else min(self.max_length, positions)

    def compared_part(self, example: Example) -> object:
        """The part of an example by which a resumed run is compared with its checkpoint.

        It leaves out what another model has computed, such as a teacher: that may differ between machines.
        """
        return example

    def sequence_lengths(self, example: Example) -> list[int]:
        """The number of tokens of each sequence that a batch has of an example."""
        return [len(example.input_ids)]

    def batch_tokens(self) -> int | None:
        """Default limit of the tokens of a training batch; None: no limit."""
        return None
