"""The processes of one run."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastenc._extras import require

Value = TypeVar("Value")


def process_state() -> Any:
    """Accelerate's ``PartialState``: how many processes there are, and which this is.

    Without an accelerator, processes have to be announced as CPU ones: accelerate takes those that torchrun starts
    for so many separate runs otherwise.
    """
    wanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    cpu = wanted or not torch.accelerator.is_available()
    return require("accelerate", extra="train").PartialState(cpu=cpu)


def on_main_process(make: Callable[[], Value]) -> Value:
    """The main process's ``make()`` on every process, for what would come out differently on each of them."""
    values = [make() if process_state().is_main_process else None]
    require("accelerate.utils", extra="train").broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]
