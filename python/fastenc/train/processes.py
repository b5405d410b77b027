"""The processes of one run."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch

from fastenc._base.extras import require

Value = TypeVar("Value")
TRUE = ("1", "true", "yes")
# Processes wait this long for one another. The others wait while the main process packs a store, trains a tokenizer or
# evaluates, which may take longer than NCCL's default of ten minutes. If a process ends, torchrun ends the others at
# once, so the limit matters only for a process that hangs.
TIMEOUT = timedelta(hours=12)


def process_state(device: str | None = None) -> Any:
    """Accelerate's ``PartialState``: the number of processes, and the index of this one.

    Args:
        device: "cpu" or "cuda". The first call decides it for the process. None: a GPU if there is one.
    Raises: ValueError if accelerate was started with FSDP or DeepSpeed, for "cuda" without a GPU, and if the process
        already has another device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU that torch sees, got none: give cpu")
    for plugin in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() in TRUE:
            raise ValueError(
                f"fastenc shards a model itself, got accelerate launch with {plugin}, which would shard it too: start "
                "the processes with torchrun, and give parallel='fsdp'"
            )
    cpu_requested = os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE
    # Without an accelerator, accelerate has to be told that it runs on CPUs. Otherwise it would take the processes that
    # torchrun starts for separate runs.
    cpu = device == "cpu" or cpu_requested or not torch.accelerator.is_available()
    state = require("accelerate", extra="train").PartialState(cpu=cpu, timeout=TIMEOUT)
    if device is not None and state.device.type != device:
        raise ValueError(
            f"this process already trains on {state.device.type}, got device {device}: start another process"
        )
    if state.num_processes > 1:
        _close_connections_at_exit()
    return state


@cache
def _close_connections_at_exit() -> None:
    """Close the connections before Python shuts down, because their threads may abort a process that shuts down."""
    atexit.register(require("accelerate", extra="train").PartialState().destroy_process_group)


def on_main_process(make: Callable[[], Value]) -> Value:
    """The result of ``make()``, which only the main process calls, on every process."""
    values = [make() if process_state().is_main_process else None]
    require("accelerate.utils", extra="train").broadcast_object_list(values)
    process_state().wait_for_everyone()  # the main process must not end before the others have the result
    return values[0]  # type: ignore[return-value]


def together(act: Callable[[], object]) -> None:
    """Call ``act()`` on every process, and wait until all have done it.

    Raises: OSError on all processes if ``act`` failed on one of them, so that none waits forever.
    """
    failure = None
    try:
        act()
    except Exception as error:
        # Not only OSError: safetensors and tokenizers have other error classes for a full disk.
        failure = str(error) or type(error).__name__
    failures = require("accelerate.utils", extra="train").gather_object([failure])
    if messages := [text for text in failures if text is not None]:
        raise OSError(messages[0])
