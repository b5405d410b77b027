"""The processes of one run."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch

from fastenc._extras import require

Value = TypeVar("Value")
TRUE = ("1", "true", "yes")
# Processes wait this long for one another. While the main process packs a store, trains a tokenizer or evaluates, the
# others wait, which may take longer than the ten minutes that NCCL allows. If a process ends, torchrun ends the others
# at once: only one that hangs meets this limit.
TIMEOUT = timedelta(hours=12)


def process_state(device: str | None = None) -> Any:
    """Accelerate's ``PartialState``: how many processes there are, and which this is.

    Args:
        device: "cpu" or "cuda", which the first call decides for the process; None: a GPU if there is one.

    Without an accelerator, processes have to be announced as CPU ones: accelerate takes those that torchrun starts
    for separate runs otherwise.
    Raises: ValueError when accelerate's launcher is to shard the model, for "cuda" without a GPU, and for another
        device than the process has already.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU that torch sees, and there is none")
    for way in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{way}", "").lower() in TRUE:
            raise ValueError(
                f"fastenc shards the model itself, but accelerate was started with {way}: configure it for "
                "plain multi-GPU, or use torchrun, and give parallel='fsdp'"
            )
    wanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE
    cpu = device == "cpu" or wanted or not torch.accelerator.is_available()
    state = require("accelerate", extra="train").PartialState(cpu=cpu, timeout=TIMEOUT)
    if device is not None and state.device.type != device:
        raise ValueError(
            f"this process trains on {state.device.type} already, got device {device}: start another process"
        )
    if state.num_processes > 1:
        _leave_in_order()
    return state


@cache
def _leave_in_order() -> None:
    """Close the connections while Python still runs: their threads may abort a process that just ends."""
    atexit.register(require("accelerate", extra="train").PartialState().destroy_process_group)


def on_main_process(make: Callable[[], Value]) -> Value:
    """The main process's ``make()`` on every process, for what would come out differently on each of them."""
    values = [make() if process_state().is_main_process else None]
    require("accelerate.utils", extra="train").broadcast_object_list(values)
    process_state().wait_for_everyone()  # the sender stays until the others have it
    return values[0]  # type: ignore[return-value]


def together(act: Callable[[], object]) -> None:
    """``act()`` on every process; returns when all have done it.

    Raises: OSError on all of them for the first that failed, so that none waits for it.
    """
    failure = None
    try:
        act()
    except (
        Exception
    ) as error:  # safetensors and tokenizers report a full disk by classes of their own
        failure = str(error) or type(error).__name__
    failures = require("accelerate.utils", extra="train").gather_object([failure])
    if said := [text for text in failures if text is not None]:
        raise OSError(said[0])
