"""Computes models that are not trained by steps from their training data."""

import json
from collections.abc import Sized
from dataclasses import asdict, fields
from pathlib import Path

from fastenc._base.files import write_text_atomically
from fastenc.models.pretrained import PretrainedModel
from fastenc.tasks import Task
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig
from fastenc.train.model_card import CARD, Origin, model_card
from fastenc.train.processes import process_state

READ = ("output", "batch_size", "device", "seed")  # the fields of a configuration that count here


class Fitting:
    """Takes the place of :class:`fastenc.train.Trainer` for a task that is not trained by steps.

    Only the main process computes the model.
    Raises: ValueError for settings of steps, which have no effect.
    """

    best = None  # there are no steps, of which one could be the best

    def __init__(
        self,
        task: Task,
        model: PretrainedModel,
        train: Sized,
        config: TrainConfig,
        dev: Sized | None,
        metric: str,
        origin: Origin | None = None,
    ):
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in READ and value != field.default:
                raise ValueError(
                    f"{field.name} must be left out for {task.name}, which is not trained by steps, got {value}"
                )
        self.task, self.model, self.config, self.metric = task, model, config, metric
        self.train_data, self.dev, self.origin = train, dev, origin
        self.output_dir = Path(config.output)
        self.accelerator = process_state()

    def train(self, resume: bool = False, overwrite: bool = False) -> dict[str, float]:
        """Compute the model, and write it with metrics.json.

        Args:
            resume: has no effect, because there are no checkpoints.
            overwrite: delete the run that the output folder has.
        Returns: the metrics on the dev set; {} without a dev set.
        """
        with checkpoints.open_output(self.output_dir, False, overwrite):
            if overwrite and self.accelerator.is_main_process:
                checkpoints.remove_run(self.output_dir)
            return self._fit()

    def _fit(self) -> dict[str, float]:
        if not self.accelerator.is_main_process:
            return {}
        model = self.model.to(self.accelerator.device)
        batch_size = self.config.batch_size or 32
        metrics = self.task.fit(model, self.train_data, self.dev, batch_size, metric=self.metric)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(self.output_dir)
        settings = {"task": self.task.name, "trained parameters": 0, **asdict(self.task)}
        titles = self.task.metric_titles(model)
        summary = [f"train: {len(self.train_data):,} items"]
        held_out = None if self.dev is None else len(self.dev)
        card = model_card(
            self.output_dir, model, settings, summary, metrics, titles, self.origin, held_out
        )
        write_text_atomically(self.output_dir / CARD, card)
        if metrics:
            path = self.output_dir / checkpoints.METRICS
            write_text_atomically(path, json.dumps(metrics, indent=1))
        return metrics
