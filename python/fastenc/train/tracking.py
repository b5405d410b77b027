"""Sends the lines of the log to TensorBoard or Weights & Biases, through accelerate's trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from fastenc._base.extras import require
from fastenc._base.files import write_text_atomically

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "fastenc"
TRACKERS = ("tensorboard", "wandb")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises: ValueError for an unknown tracker, ImportError with the extra to install for a missing library."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"track must be among {', '.join(TRACKERS)}, got {name!r}: give one of them"
            )
        require(name, extra=name)


def start_trackers(
    accelerator: "Accelerator", output_dir: Path, step: int, settings: Mapping[str, object]
) -> None:
    """Start the trackers, or continue after ``step``.

    What an interrupted run logged after ``step`` is dropped or overwritten. TensorBoard's files are in
    output_dir/fastenc. Weights & Biases continues the run whose id is in output_dir/wandb-id.
    """
    options: dict[str, dict[str, object]] = {"tensorboard": {"purge_step": step + 1}}
    if accelerator.is_main_process and "wandb" in map(str, accelerator.log_with):
        options["wandb"] = {
            "id": _wandb_id(output_dir / "wandb-id", new=not step),
            "resume": "allow",
            "name": output_dir.name,
            "dir": str(output_dir),
            "config": settings,
        }
    accelerator.init_trackers(PROJECT, init_kwargs=options)


def stop_trackers(accelerator: "Accelerator") -> None:
    """Close the trackers."""
    # accelerator.end_training would also close the connections between the processes.
    for tracker in accelerator.trackers:
        tracker.finish()


def _wandb_id(path: Path, new: bool) -> str:
    if new or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, uuid4().hex[:12])
    return path.read_text()
