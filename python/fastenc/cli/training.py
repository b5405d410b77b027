"""What the two training commands share."""

from pathlib import Path

from fastenc.cli.outputs import format_metrics
from fastenc.train import Trainer
from fastenc.train.fitting import Fitting

# An option and the one that replaces it. If a file gives the second and the command line the first, the first counts.
INSTEAD = {
    "epochs": "max_steps",
    "accumulation": "global_batch_size",
    "batch_tokens": "global_batch_size",
    "warmup": "warmup_steps",
}


def check_other_folder(output: str, start: str | None) -> None:
    """Raises: ValueError if the run would write into the folder of the checkpoint that it starts from."""
    if (
        start is not None
        and Path(start).is_dir()
        and Path(start).resolve() == Path(output).resolve()
    ):
        raise ValueError(
            f"--output must not be the folder of the checkpoint that is trained, got {output} for both: give another "
            "folder"
        )


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
        print(f"model in {trainer.output_dir}")
