"""Runs the trainer of a training command."""

from fastenc.cli.outputs import format_metrics
from fastenc.train import Trainer
from fastenc.train.fitting import Fitting


def run_trainer(
    trainer: Trainer | Fitting,
    resume: bool,
    overwrite: bool,
    titles: dict[str, str] | None = None,
) -> None:
    """Train, and print the metrics and the output folder.

    Args:
        titles: {metric: title}, as of ``Task.metric_titles``.
    """
    metrics = trainer.train(resume=resume, overwrite=overwrite)
    if trainer.accelerator.is_main_process:
        if metrics:
            step = f"step {trainer.best['step']:,} " if trainer.best else ""
            print(f"best: {step}by {trainer.metric}: {format_metrics(metrics, titles)}")
        print(f"model, metrics.json and log.jsonl in {trainer.output_dir}")
