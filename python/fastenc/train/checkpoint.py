"""Checkpoints of a run: folders of safetensors and JSON. A folder gets its name only when it is complete."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import flush, write_atomically
from fastenc.models.checkpoint import CONFIG
from fastenc.models.pretrained import PretrainedModel
from fastenc.train.optimizer_files import read_optimizer, write_optimizer
from fastenc.train.output_lock import output_lock
from fastenc.train.processes import process_state, together

STATE, RANDOM = "state.json", "random.safetensors"
METRICS = "metrics.json"  # of the best checkpoint, beside the result


def save_checkpoint(
    output_dir: Path,
    step: int,
    model: PretrainedModel | None,
    moments: dict[str, Tensor],
    random_states: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write ``checkpoint-<step>``: model, optimiser, random generators, progress. All processes must call it.

    The files are written into a hidden folder and flushed to the disk. Then the folder is renamed. So a kill or a full
    disk at any moment does not harm the earlier checkpoints.

    Args:
        model: the model with all its weights on the main process, None on the others.
        moments: of ``flat_optimizer``; each process writes its shards of them.
        random_states: states of all processes' random generators; only the main process's argument is used.
        state: progress and settings, as JSON values; only the main process's argument is used.
    Raises: OSError with the last good checkpoint, on every process.
    """
    processes, final = process_state(), folder_of(output_dir, step)
    hidden = _hidden(final)

    def write() -> None:
        if processes.is_main_process:
            assert model is not None
            model.save_pretrained(hidden)
            save_file = require("safetensors.torch", extra="train").save_file
            write_atomically(hidden / RANDOM, lambda path: save_file(random_states, path))
            text = json.dumps({**state, "step": step}, indent=1)
            (hidden / STATE).write_text(text, encoding="utf-8")

    def publish() -> None:
        if processes.is_main_process:
            for path in (*hidden.rglob("*"), hidden):
                flush(path)
            os.replace(hidden, final)
            flush(output_dir)

    try:
        together(lambda: hidden.mkdir(parents=True) if processes.is_main_process else None)
        together(write)
        together(lambda: write_optimizer(hidden, moments, processes.is_main_process))
        together(publish)
    except OSError as error:
        last = latest_checkpoint(output_dir)
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise OSError(
            f"the checkpoint at step {step} could not be written to {output_dir} ({error}); {kept}. "
            "Make room there, and continue with resume=True"
        ) from error
    finally:
        if processes.is_main_process:
            shutil.rmtree(hidden, ignore_errors=True)
    return final


def folder_of(output_dir: Path, step: int) -> Path:
    """Folder of the checkpoint at a step."""
    return output_dir / f"checkpoint-{step:08d}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = output_dir.glob("checkpoint-*")
    return sorted(path for path in folders if re.fullmatch(r"checkpoint-\d{8}", path.name))


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return next(iter(reversed(checkpoints(output_dir))), None)


@contextmanager
def open_output(output_dir: Path, resume: bool, overwrite: bool = False) -> Iterator[Path | None]:
    """A context that locks an output folder for this run. It gives the checkpoint to resume from, or None.

    Raises: ValueError as :func:`check_free`, or if another process uses the folder.
    """
    check_free(output_dir, resume, overwrite)
    with output_lock(output_dir):
        yield check_free(output_dir, resume, overwrite)


def check_free(output_dir: Path, resume: bool, overwrite: bool = False) -> Path | None:
    """The checkpoint from which a run in ``output_dir`` continues; None if it starts.

    Raises: ValueError if there is a checkpoint and neither ``resume`` nor ``overwrite`` is True, if both are, if there
        is no folder and ``resume`` is True, or if there is a model without a checkpoint and ``overwrite`` is False.
    """
    if resume and overwrite:
        raise ValueError(
            "a run is either continued with resume=True or replaced with overwrite=True, got both: give one of them"
        )
    if overwrite:
        return None
    if resume and not output_dir.is_dir():
        raise ValueError(
            f"resume=True needs the output folder of an earlier run, but {output_dir} does not exist: check its name, "
            "or leave it out"
        )
    latest = latest_checkpoint(output_dir)
    if latest is not None and not resume:
        raise ValueError(
            f"{output_dir} holds a run ({latest.name}): continue it with resume=True, replace it with overwrite=True, "
            "or give another output folder"
        )
    if latest is None and (output_dir / CONFIG).exists():
        raise ValueError(
            f"{output_dir} holds a model, and no checkpoint of a run that could be continued: replace the model with "
            "overwrite=True, or give another output folder"
        )
    return latest


def remove_run(output_dir: Path) -> None:
    """Delete a run's checkpoints and the files of its result. Other files in the folder stay."""
    newest = latest_checkpoint(output_dir)
    if newest is None:
        return
    # A checkpoint has the files of the result, such as those that say which head a model has.
    for path in (*(output_dir / each.name for each in newest.iterdir()), output_dir / METRICS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in checkpoints(output_dir):
        shutil.rmtree(path)


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's progress and settings."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _corrupt(folder, error) from error


def load_optimizer(
    folder: Path, model: PretrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Load a checkpoint's moments into the optimiser of a model, and return the checkpoint's random states."""
    load_file = require("safetensors.torch", extra="train").load_file
    error_class = require("safetensors", extra="train").SafetensorError
    parameters = dict(model.named_parameters())
    try:
        for name, entry, tensor in read_optimizer(folder, parameters):
            optimizer.state[parameters[name]][entry] = tensor
        return load_file(folder / RANDOM)
    except (error_class, OSError, ValueError) as error:
        raise _corrupt(folder, error) from error


def read_weights(folder: Path, model_class: type[PretrainedModel]) -> dict[str, Tensor]:
    """The weights in a checkpoint: {name: tensor}. ``model_class`` is the model's class."""
    try:
        return model_class.from_pretrained(folder).state_dict()
    except ValueError as error:
        raise _corrupt(folder, error) from error


def remove_old(output_dir: Path, keep: int, best: Path | None) -> None:
    """Delete all checkpoints except the newest ``keep`` and the best."""
    for path in checkpoints(output_dir)[:-keep]:
        if path != best:
            # Renamed first, so that a kill while files are deleted leaves no folder that looks like a checkpoint.
            os.replace(path, _hidden(path))
    remove_unfinished(output_dir)


def remove_unfinished(output_dir: Path) -> None:
    """Delete the hidden folders that a killed run left while it wrote or removed checkpoints."""
    for path in output_dir.glob(".checkpoint-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def random_state() -> dict[str, Tensor]:
    """States of torch's default random generators in this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor]) -> None:
    """Set torch's default random generators to the states of :func:`random_state`."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def flat_optimizer(model: PretrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts, named "parameter|entry"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}|{key}": value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _corrupt(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder} is corrupt ({error}): remove it, and resume from the checkpoint before it"
    )
