"""The trainer of fine-tuning, for any task."""

import json
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fastenc.adapt import cache_features
from fastenc.models.adapters.adaptations import encoder_of, method_in_use
from fastenc.models.pretrained import PretrainedModel
from fastenc.packing import ModelArguments
from fastenc.tasks import Task
from fastenc.tasks.inference import Fill, TokenSequence
from fastenc.tasks.summary import describe_lengths
from fastenc.train.config import TrainConfig, examples_checksum, fine_tuning_lr
from fastenc.train.fitting import Fitting
from fastenc.train.loop import Evaluate, Trainer
from fastenc.train.model_card import Origin
from fastenc.train.processes import process_state


def task_trainer(
    task: Task,
    model: PretrainedModel,
    train: Sized,
    config: TrainConfig,
    *,
    dev: Sized | None = None,
    metric: str | None = None,
    features: str | Path | None = None,
    features_dtype: torch.dtype = torch.float32,
    origin: Origin | None = None,
) -> Trainer | Fitting:
    """A trainer of a task's model; a :class:`Fitting` for a task that is not trained by steps.

    Args:
        model: the result of ``task.load(name, train)``.
        train, dev: data as the task reads it. ``dev`` chooses the best checkpoint; None: the last weights are the
            result.
        config: if it has no learning rate, that of :func:`fastenc.train.fine_tuning_lr` is used.
        metric: one of ``task.metrics(dev)``; None: the first.
        features: folder of the encoder's outputs, to train the head alone. The encoder must be frozen. The outputs are
            computed in the first run on these data (:func:`fastenc.adapt.cache_features`). None: no such cache.
        features_dtype: dtype of the files in ``features``.
        origin: the first weights and the files of the data, for the model card.
    Raises: ValueError for a metric that the task does not have, or a metric without ``dev``.
    """
    _check_config(task, config, features)
    _store_options(task, model, train)
    metric = _checked_metric(task, train, dev, metric)
    if not task.trains_by_steps:
        return Fitting(task, model, train, config, dev, metric, origin)
    config = replace(
        config,
        batch_tokens=config.batch_tokens or task.batch_tokens(),
        learning_rate=config.learning_rate
        or default_lr(model, config, len(train), adapt="features" if features else None),
    )
    # For evaluation, if batch_tokens alone limits the batches of training.
    batch_size = config.batch_size or 32
    examples = task.encode(train, model)
    held_out = [] if dev is None else task.encode(dev, model)
    adaptation = encoder_of(model).adapted.in_use()
    fill, held_out_fill = (
        _cached(task, model, each, config, Path(features), features_dtype)
        if features is not None and each
        else None
        for each in (examples, held_out)
    )

    def on_held_out(measure: Callable[..., dict[str, float]]) -> Evaluate | None:
        if dev is None:
            return None
        return lambda model: measure(model, dev, held_out, batch_size, held_out_fill)

    return Trainer(
        model,
        config,
        range(len(examples)),
        [len(example.input_ids) for example in examples],
        _Collate(task, examples, fill),
        evaluate=on_held_out(task.evaluate),
        calibrate=on_held_out(task.calibrate),
        summary=[
            _described(name, task, model, data, each)
            for name, data, each in (("train", train, examples), ("dev", dev, held_out))
            if each and data is not None
        ],
        titles=task.metric_titles(model),
        origin=origin,
        held_out=None if dev is None else len(dev),
        metric=metric,
        higher_is_better=metric != "loss",
        settings={
            "task": task.name,
            **asdict(task),
            **task.model_options(train),
            "train examples": examples_checksum(map(task.compared_part, examples)),
            "held_out": len(held_out),
            "held-out examples": examples_checksum(map(task.compared_part, held_out)),
            **({} if features is None else {"features": str(features_dtype)}),
            **({} if adaptation is None else {"adaptation": str(adaptation)}),
        },
    )


def _check_config(task: Task, config: TrainConfig, features: str | Path | None) -> None:
    """Raises: ValueError for a way of training that the task does not have."""
    if config.parallel == "fsdp" and getattr(task, "tokens_at_once", None) is not None:
        raise ValueError(
            "tokens_at_once excludes parallel=fsdp, because every process must then compute the same number of groups, "
            "got both: leave out tokens_at_once, or give parallel=ddp"
        )
    if features is not None and not task.trains_by_steps:
        raise ValueError(
            f"{task.name} trains no head, so it reads no cached features, got {features}: leave out features"
        )


def _checked_metric(task: Task, train: Sized, dev: Sized | None, metric: str | None) -> str:
    """The metric that chooses the best checkpoint. Raises: ValueError as :func:`task_trainer`."""
    known = task.metrics(train if dev is None else dev)
    if metric is not None and (dev is None or metric not in known):
        given = f"{metric} without data to evaluate on" if dev is None else metric
        raise ValueError(f"metric= needs dev= and one of {', '.join(known)}, got {given}")
    return metric or known[0]


def _store_options(task: Task, model: PretrainedModel, train: Sized) -> None:
    """Store the task's options in the model, where they replace those of an earlier training.

    This comes before the texts are encoded, because encoding uses them. A default length is stored as the length that
    the model can take.
    """
    stored = task
    if task.max_length != type(task).max_length:
        task.check_max_length(model)
    elif task.max_length is not None:
        stored = replace(task, max_length=task.room(model))
    model.task_options = json.loads(json.dumps(stored.options_to_keep(train)))


class _Collate:
    """The model's arguments of examples that are given by their indices, and what their loss is a mean over."""

    def __init__(self, task: Task, examples: Sequence[TokenSequence], fill: Fill | None):
        self.task, self.examples, self.fill = task, examples, fill

    def __call__(self, indices: Sequence[int], step: int) -> ModelArguments:
        arguments = self.task.collate_step([self.examples[i] for i in indices], step)
        if self.fill is not None:
            arguments["batch"] = self.fill(arguments["batch"], indices)
        return arguments

    def items(self, arguments: ModelArguments) -> dict[str, int]:
        return {"loss": self.task.loss_items(arguments)}


def _described(
    name: str, task: Task, model: PretrainedModel, data: Sized, examples: Sequence[TokenSequence]
) -> str:
    """One line about a data set: its size, lengths and labels."""
    lengths = [length for example in examples for length in task.sequence_lengths(example)]
    details = (describe_lengths(lengths, task.room(model)), task.describe_labels(data))
    return f"{name}: {len(data):,} items, {'; '.join(filter(None, details))}"


def default_lr(
    model: PretrainedModel, config: TrainConfig, examples: int, adapt: str | None = None
) -> float:
    """:func:`fine_tuning_lr` for this model with its adaptation and a run over this number of examples."""
    steps = config.steps_over(examples, process_state().num_processes)
    return fine_tuning_lr(model.config.hidden_size, adapt or method_in_use(model), steps)


def _cached(
    task: Task,
    model: PretrainedModel,
    examples: Sequence[TokenSequence],
    config: TrainConfig,
    folder: Path,
    dtype: torch.dtype,
) -> Fill:
    """The function that adds the encoder's cached outputs to batches of these examples."""
    state = process_state()
    model.to(state.device)  # the trainer's device
    with state.main_process_first():
        cache = cache_features(
            model,
            examples,
            task.collate,
            folder,
            per_token=not (task.reads_first_token and getattr(model, "pooling", "cls") == "cls"),
            dtype=dtype,
            autocast_dtype=torch.bfloat16 if config.precision == "bf16" else None,
            batch_size=config.batch_size or 32,
            show_progress=None if state.is_main_process else False,
        )
    return cache.fill
