"""What the training commands share."""

from fastenc.cli.outputs import figures
from fastenc.train import Trainer
from fastenc.train.fitting import Fitting


def run_trainer(
    trainer: Trainer | Fitting, resume: bool, titles: dict[str, str] | None = None
) -> None:
    """Train, and say what came of it and where it is."""
    metrics = trainer.train(resume=resume)
    if trainer.accelerator.is_main_process:
        if metrics:
            step = f"step {trainer.best['step']:,} " if trainer.best else ""
            print(f"best: {step}by {trainer.metric}: {figures(metrics, titles)}")
        print(f"model, metrics.json and log.jsonl in {trainer.output_dir}")
