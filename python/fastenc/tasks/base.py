"""What a task is: everything between files and a model that fine-tuning, evaluation and prediction need."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastenc._options import option
from fastenc._progress import progress_bar
from fastenc._transfer import send_arguments
from fastenc.data import BatchSampler
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.loss_terms import labelled_items
from fastenc.packing import PackedBatch
from fastenc.tasks.report import Report

QUOTING = (
    "Quotes of a .tsv file: csv, values may be in quotes, as pandas writes them, or none, quotes are kept as they are. "
    "Default: none, and values that are evidently quoted are an error."
)
MIX = "mix"
Fill = Callable[[PackedBatch, Sequence[int]], PackedBatch]


@dataclass(frozen=True)
class Task(ABC):
    """One task. A subclass is a frozen dataclass whose fields are its options.

    ``data`` below is whatever the task's reader returns; ``examples`` are sequences of tokens ready for the model, each
    with ``input_ids``, one or several for an item of the data.

    Class attributes:
        name: what ``fastenc finetune --task`` takes.
        model_class: whose ``architecture`` tells a checkpoint of this task.
        per_token: the model's logits have a row for every token, rather than one for every sequence.
        trains_by_steps: whether the model is trained by gradient steps; otherwise :meth:`fit` computes it.
        reads_first_token: the head reads nothing of the encoder's output but each sequence's first token (or the pooler
            over it), so that cached features need hold no other.
        outputs: suffixes of the files that predictions can be written to.
        headed: those of them whose first line is a header.
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
        "mix: the head reads a learned weighted sum of the embeddings' output and all layers, not the last layer's "
        "output alone. Default: what the checkpoint has.",
    )

    def __post_init__(self) -> None:
        if self.layers not in (None, MIX):
            raise ValueError(f"layers must be {MIX}, or left out, got {self.layers!r}")
        if self.layers == MIX and not self.trains_by_steps:
            raise ValueError(f"{self.name} trains no weights of layers: leave out --layers {MIX}")

    @abstractmethod
    def read(self, path: str | Path, train: Any = None) -> Any:
        """Data with its labels; ``train``: the training set, or the model trained on it, which says what labels there
        are.

        Raises: ValueError naming file, line and remedy.
        """

    @abstractmethod
    def read_inputs(self, path: str | Path) -> Any:
        """Data to predict for, without labels."""

    def input_parts(self, path: str | Path, size: int) -> Iterator[Any]:
        """What :meth:`read_inputs` returns, in parts of ``size`` items that are read when they are asked for; in one
        part where a file cannot be read so."""
        yield self.read_inputs(path)

    @abstractmethod
    def model_options(self, train: Any) -> dict[str, Any]:
        """What ``model_class.from_pretrained`` needs to know to make a head for the training set, as JSON values."""

    @abstractmethod
    def metrics(self, train: Any) -> tuple[str, ...]:
        """Names of the metrics, "loss" among them; the first chooses the best checkpoint."""

    @abstractmethod
    def encode(self, data: Any, model: Any) -> list[Any]:
        """The examples of the data, with labels where it has them."""

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """A batch: the model's arguments, ``batch`` (a PackedBatch) and, for labelled examples, ``labels``."""

    @abstractmethod
    def decode(self, model: Any, data: Any, examples: Sequence[Any], logits: list[Tensor]) -> Any:
        """Predictions for the items of the data, from each example's logits (see :func:`run`)."""

    @abstractmethod
    def score(self, model: Any, data: Any, predictions: Any) -> dict[str, float]:
        """The metrics of predictions for labelled data, without the loss."""

    @abstractmethod
    def lines(self, model: Any, data: Any, predictions: Any, suffix: str) -> Iterable[str]:
        """The lines of a file of predictions that ends in ``suffix``, one of ``outputs``."""

    def data_of(self, inputs: Sequence[Any]) -> Any:
        """Inputs in Python, such as texts, as :meth:`read_inputs` returns those of a file.

        Raises: ValueError for inputs of another kind.
        """
        raise ValueError(f"{self.name} predicts for files alone: use fastenc predict")

    def report(self, model: Any, data: Any, predictions: Any) -> "Report":
        """Files about predictions for labelled data: figures of each class, a confusion matrix, the mistakes.

        Raises: ValueError where there are no classes.
        """
        raise ValueError(f"{self.name} has no classes to report on: leave out --report")

    def describe_labels(self, data: Any) -> str:
        """What the labels of a set are and how often each occurs, in words; "" for nothing to say."""
        return ""

    def metric_titles(self, model: Any) -> dict[str, str]:
        """What to call the metrics whose name alone leaves open what they measure."""
        return {}

    def check_max_length(self, model: Any) -> None:
        """Raises: ValueError for a ``max_length`` beyond what the model has positions for."""
        if self.max_length is not None and self.max_length > self.room(model):
            raise ValueError(
                f"max_length must be at most the model's {self.room(model)} positions, got {self.max_length}"
            )

    def load(self, name: str | Path, train: Any = None) -> Any:
        """The model of a checkpoint: as it is, or with a head for a training set.

        Raises: ValueError for a checkpoint of another task, or without a tokenizer.
        """
        options = {} if train is None else self.model_options(train)
        if self.layers == MIX:
            options["layer_mix"] = True
        model = self.model_class.from_pretrained(name, **options)
        if model.tokenizer is None:
            raise ValueError(f"{name} has no tokenizer.json, which text needs")
        return model

    def options_to_keep(self, train: Any) -> dict[str, Any]:
        """The options that a model keeps in its config.json, so that prediction and evaluation go by them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def options_kept(cls, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Those of a config.json that this version knows."""
        known = {field.name for field in fields(cls)}
        kept = hf_config.get("task_options") or {}
        return {name: value for name, value in kept.items() if name in known}

    def predict(
        self, model: Any, data: Any, batch_size: int = 32, show_progress: bool | None = False
    ) -> Any:
        """Predictions for the items of the data, in their order."""
        examples = self.encode(data, model)
        return self.predict_encoded(model, data, examples, batch_size, show_progress)

    def predict_encoded(
        self,
        model: Any,
        data: Any,
        examples: Sequence[Any],
        batch_size: int = 32,
        show_progress: bool | None = False,
    ) -> Any:
        """:meth:`predict` for data whose ``examples`` are those of :meth:`encode`."""
        logits, _ = run(model, examples, self.collate, self.logits_of, batch_size, show_progress)
        return self.decode(model, data, examples, logits)

    def evaluate(
        self,
        model: Any,
        data: Any,
        examples: Sequence[Any],
        batch_size: int = 32,
        fill: Fill | None = None,
        show_progress: bool | None = False,
    ) -> dict[str, float]:
        """The metrics of labelled data, whose ``examples`` are those of :meth:`encode`; ``fill``: see :func:`run`."""
        logits, loss = run(
            model, examples, self.collate, self.logits_of, batch_size, show_progress, fill=fill
        )
        predictions = self.decode(model, data, examples, logits)
        return {"loss": loss, **self.score(model, data, predictions)}

    def calibrate(
        self,
        model: Any,
        data: Any,
        examples: Sequence[Any],
        batch_size: int = 32,
        fill: Fill | None = None,
    ) -> dict[str, float]:
        """Choose by held-out data what the model keeps beside its weights; called once they are trained.

        Returns: as :meth:`evaluate`, with what was chosen; {} where there is nothing to choose.
        """
        return {}

    def fit(
        self,
        model: Any,
        train: Any,
        dev: Any,
        batch_size: int = 32,
        show_progress: bool | None = None,
    ) -> dict[str, float]:
        """Compute the model from the training set, where it is not trained by steps.

        Returns: the metrics of the dev set, {} where ``dev`` is None.
        """
        raise NotImplementedError

    def logits_of(self, arguments: dict[str, Any]) -> list[int] | None:
        """How many rows of a batch's logits belong to each sequence; None where that is one without exception."""
        return arguments["batch"].cu_seqlens.diff().tolist() if self.per_token else None

    def room(self, model: Any) -> int:
        """Tokens that a sequence may have, special tokens included."""
        positions = model.positions
        return positions if self.max_length is None else min(self.max_length, positions)

    def batch_tokens(self) -> int | None:
        """Most tokens of a training batch, where the configuration does not say; None: no limit."""
        return None


@torch.inference_mode()
def run(
    model: Any,
    examples: Sequence[Any],
    collate: Callable[[Sequence[Any]], dict[str, Any]],
    logits_of: Callable[[dict[str, Any]], list[int] | None],
    batch_size: int = 32,
    show_progress: bool | None = False,
    fill: Fill | None = None,
) -> tuple[list[Tensor], float]:
    """A model's logits and mean loss on examples, in evaluation mode; batches are formed by length.

    Args:
        logits_of: as :meth:`Task.logits_of`.
        fill: adds what is known of the examples with these indices to their batch
            (:meth:`fastenc.adapt.FeatureCache.fill`).
    Returns: float32 logits on the CPU in the examples' order, (num_labels,) each, or (rows, num_labels) each where
        ``logits_of`` counts them; and the mean loss over all labelled items, 0 without labels.
    """
    device = next(model.parameters()).device
    results: list[Any] = [None] * len(examples)
    total, items = torch.zeros((), dtype=torch.float64, device=device), 0
    outputs = []
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids), reverse=True)
    batches = list(BatchSampler(order, batch_size, shuffle=False).epoch(0)) if order else []
    with evaluation_mode(model):
        for indices in progress_bar(batches, "predicting", "batch", show_progress):
            chosen = [order[i] for i in indices]
            arguments = collate([examples[i] for i in chosen])
            counts = logits_of(arguments)
            if fill is not None:
                arguments["batch"] = fill(arguments["batch"], chosen)
            output = model(**send_arguments(arguments, device))
            if output.loss is not None:
                labelled = labelled_items(arguments["labels"])
                total, items = total + output.loss * labelled, items + labelled
            outputs.append((chosen, counts, output.logits.float()))
    # Read at the end, so that no batch waits for the one before it.
    for chosen, counts, logits in outputs:
        logits = logits.cpu()
        of_examples = logits if counts is None else logits.split(counts)
        for index, values in zip(chosen, of_examples, strict=True):
            results[index] = values
    return results, total.item() / max(items, 1)
