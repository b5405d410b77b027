"""Fine-tuning on any task."""

from dataclasses import asdict, replace
from typing import Any

from fastenc.tasks import Task
from fastenc.train.config import TrainConfig
from fastenc.train.loop import Trainer


def task_trainer(
    task: Task,
    model: Any,
    train: Any,
    config: TrainConfig,
    *,
    dev: Any = None,
    metric: str | None = None,
) -> Trainer:
    """A trainer of a task's model.

    Args:
        model: of ``task.load(name, train)``.
        train, dev: data as the task reads it; ``dev`` chooses the best checkpoint, None keeps the last weights.
        metric: one of ``task.metrics(train)``; None takes the first.
    Raises: ValueError for a metric that the task does not have, or that has no data to be measured on.
    """
    known = task.metrics(train)
    if metric is not None and (dev is None or metric not in known):
        raise ValueError(f"--metric needs --dev and one of {', '.join(known)}, got {metric}")
    metric = metric or known[0]
    config = replace(config, batch_tokens=config.batch_tokens or task.batch_tokens())
    examples = task.encode(train, model)
    held_out = [] if dev is None else task.encode(dev, model)
    return Trainer(
        model,
        config,
        examples,
        [len(example.input_ids) for example in examples],
        lambda chosen, step: task.collate(chosen),
        evaluate=None
        if dev is None
        else lambda m: task.evaluate(m, dev, held_out, config.batch_size),
        calibrate=None
        if dev is None
        else lambda m: task.calibrate(m, dev, held_out, config.batch_size),
        metric=metric,
        higher_is_better=metric != "loss",
        settings={
            "task": task.name,
            **asdict(task),
            **task.model_options(train),
            "held_out": len(held_out),
        },
    )
