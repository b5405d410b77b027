"""Checkpoints of a run: safetensors and JSON in a folder that appears whole or not at all."""

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

from fastenc._extras import require
from fastenc._files import flush
from fastenc.models.pretrained import PretrainedModel
from fastenc.train.optimizer_files import read_optimizer, write_optimizer
from fastenc.train.output_lock import output_lock
from fastenc.train.processes import process_state, together

STATE, RANDOM = "state.json", "random.safetensors"


def save_checkpoint(
    output_dir: Path,
    step: int,
    model: PretrainedModel | None,
    moments: dict[str, Tensor],
    random_states: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write ``checkpoint-<step>``: model, optimiser, random generators, progress. All processes call it together.

    Everything goes into a hidden folder first, is flushed to the disk and then renamed, so that a kill or a full
    disk at any moment leaves the checkpoints that were there.

    Args:
        model: whole, on the main process; so are random_states and state.
        moments: of ``flat_optimizer``; each process writes its shards of them.
    Raises: OSError naming the last good checkpoint, on every process.
    """
    processes, final = process_state(), folder_of(output_dir, step)
    hidden = _hidden(final)

    def write() -> None:
        if processes.is_main_process:
            assert model is not None
            model.save_pretrained(hidden)
            save_file = require("safetensors.torch", extra="train").save_file
            save_file(random_states, hidden / RANDOM)
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
            "Make room there and resume"
        ) from error
    finally:
        if processes.is_main_process:
            shutil.rmtree(hidden, ignore_errors=True)
    return final


def folder_of(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step:08d}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = output_dir.glob("checkpoint-*")
    return sorted(path for path in found if re.fullmatch(r"checkpoint-\d{8}", path.name))


def latest_checkpoint(output_dir: Path) -> Path | None:
    return next(iter(reversed(checkpoints(output_dir))), None)


@contextmanager
def open_output(output_dir: Path, resume: bool) -> Iterator[Path | None]:
    """Lock an output folder for this run, and return the checkpoint from which the run continues, or None.

    Raises: ValueError as :func:`check_free`, or when another process holds the folder.
    """
    check_free(output_dir, resume)
    with output_lock(output_dir):
        yield check_free(output_dir, resume)


def check_free(output_dir: Path, resume: bool) -> Path | None:
    """The checkpoint from which a run in ``output_dir`` continues.

    Raises: ValueError when there is one and ``resume`` is False, or no folder and ``resume`` is True.
    """
    if resume and not output_dir.is_dir():
        raise ValueError(
            f"--resume goes on with a run, and there is no folder {output_dir}: check its name, or leave --resume out"
        )
    found = latest_checkpoint(output_dir)
    if found is not None and not resume:
        raise ValueError(
            f"{output_dir} holds a run ({found.name}): resume it (--resume), or give another output folder (-o)"
        )
    return found


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's progress and settings."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _corrupt(folder, error) from error


def load_optimizer(
    folder: Path, model: PretrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Put a checkpoint's moments into the optimiser of a model's parameters; returns its random states."""
    load_file = require("safetensors.torch", extra="train").load_file
    error_class = require("safetensors", extra="train").SafetensorError
    parameters = dict(model.named_parameters())
    try:
        for name, entry, tensor in read_optimizer(folder, parameters):
            optimizer.state[parameters[name]][entry] = tensor
        return load_file(folder / RANDOM)
    except (error_class, OSError, ValueError) as error:
        raise _corrupt(folder, error) from error


def read_weights(folder: Path, kind: type[PretrainedModel]) -> dict[str, Tensor]:
    """The weights of a checkpoint of such a model."""
    try:
        return kind.from_pretrained(folder).state_dict()
    except ValueError as error:
        raise _corrupt(folder, error) from error


def remove_old(output_dir: Path, keep: int, best: Path | None) -> None:
    """Delete all but the newest ``keep`` checkpoints and the best."""
    for path in checkpoints(output_dir)[:-keep]:
        if path != best:
            # Renamed first: a kill half way must not leave a folder that looks like a checkpoint.
            os.replace(path, _hidden(path))
    remove_unfinished(output_dir)


def remove_unfinished(output_dir: Path) -> None:
    """Delete what a kill left of checkpoints that were being written or removed."""
    for path in output_dir.glob(".checkpoint-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def random_state() -> dict[str, Tensor]:
    """States of torch's default generators on this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def flat_optimizer(model: PretrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts under "parameter|entry"."""
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
        f"{folder} is corrupt ({error}): remove it to resume from the checkpoint before it"
    )
