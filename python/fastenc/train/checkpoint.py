"""Checkpoints of a run: safetensors and JSON in a folder that appears whole or not at all."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastenc._extras import require
from fastenc._files import write_atomically

STATE, OPTIMIZER, RANDOM, BEST = (
    "state.json",
    "optimizer.safetensors",
    "random.safetensors",
    "best.json",
)


def save_checkpoint(
    output_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random_states: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write ``checkpoint-<step>``: model, optimiser, random generators, progress.

    Everything goes into a hidden folder first, is flushed to the disk and then renamed, so that a kill or a full
    disk at any moment leaves the checkpoints that were there.
    Raises: OSError naming the last good checkpoint.
    """
    save_file = require("safetensors.torch", extra="train").save_file
    final = output_dir / f"checkpoint-{step:08d}"
    hidden = output_dir / f".{final.name}.tmp"
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        model.save_pretrained(hidden)
        save_file(_flat_optimizer(model, optimizer), hidden / OPTIMIZER)
        save_file(random_states, hidden / RANDOM)
        (hidden / STATE).write_text(json.dumps({**state, "step": step}, indent=1), encoding="utf-8")
        for path in hidden.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(hidden, final)
    except Exception as error:
        shutil.rmtree(hidden, ignore_errors=True)
        last = latest_checkpoint(output_dir)
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise OSError(
            f"the checkpoint at step {step} could not be written to {output_dir} ({error}); {kept}. "
            "Make room there and resume"
        ) from error
    return final


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [
        p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{8}", p.name)
    ]
    return sorted(path for path in found if (path / STATE).is_file())


def latest_checkpoint(output_dir: Path) -> Path | None:
    return next(iter(reversed(checkpoints(output_dir))), None)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put a checkpoint's weights into model and optimiser; returns its progress and random states."""
    load_file = require("safetensors.torch", extra="train").load_file
    error_class = require("safetensors", extra="train").SafetensorError
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        stored = type(model).from_pretrained(folder).state_dict()
        moments, random_states = load_file(folder / OPTIMIZER), load_file(folder / RANDOM)
    except (error_class, OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder} is corrupt ({error}): remove it to resume from the checkpoint before it"
        ) from error
    model.load_state_dict(stored)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = names[id(parameter)] + "|"
            entries = {
                key.removeprefix(prefix): v for key, v in moments.items() if key.startswith(prefix)
            }
            if entries:
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) for key, value in entries.items()
                }
    return state, random_states


def _flat_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts under "parameter|entry"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}|{key}": value.detach().cpu().contiguous()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


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


def write_best(output_dir: Path, checkpoint: Path, value: float) -> None:
    text = json.dumps({"checkpoint": checkpoint.name, "value": value})
    write_atomically(output_dir / BEST, lambda path: path.write_text(text, encoding="utf-8"))


def read_best(output_dir: Path) -> dict[str, Any] | None:
    path = output_dir / BEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def remove_old(output_dir: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints and the best."""
    best = read_best(output_dir)
    for path in checkpoints(output_dir)[:-keep]:
        if best is None or path.name != best["checkpoint"]:
            shutil.rmtree(path, ignore_errors=True)
