"""Models that are computed from their training data, not trained by steps."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastenc._files import write_atomically
from fastenc.tasks import Task
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig
from fastenc.train.model_card import write_card
from fastenc.train.processes import process_state


class Fitting:
    """What a :class:`fastenc.train.Trainer` is for a task that is not trained by steps; the main process does it."""

    best = None  # no step is

    def __init__(
        self, task: Task, model: Any, train: Any, config: TrainConfig, dev: Any, metric: str
    ):
        self.task, self.model, self.config, self.metric = task, model, config, metric
        self.train_data, self.dev = train, dev
        self.output_dir = Path(config.output)
        self.accelerator = process_state()

    def train(self, resume: bool = False) -> dict[str, float]:
        """Fit the model and write it, with metrics.json; there is nothing to resume, so that it begins anew.

        Returns: the metrics on the dev set, {} without one.
        """
        with checkpoints.open_output(self.output_dir, resume=False):
            return self._fit()

    def _fit(self) -> dict[str, float]:
        if not self.accelerator.is_main_process:
            return {}
        model = self.model.to(self.accelerator.device)
        batch_size = self.config.batch_size or 32
        metrics = self.task.fit(model, self.train_data, self.dev, batch_size)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(self.output_dir)
        settings, titles = (
            {"task": self.task.name, **asdict(self.task)},
            self.task.metric_titles(model),
        )
        write_card(self.output_dir, model, settings, (), metrics, titles)
        if metrics:
            text = json.dumps(metrics, indent=1)
            write_atomically(self.output_dir / "metrics.json", lambda path: path.write_text(text))
        return metrics
