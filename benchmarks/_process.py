"""One measurement in a process of its own, so that its peak memory is its own too."""

import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch


def isolated(function: Callable[..., dict], *arguments: Any) -> dict:
    """``function(*arguments)`` in a fresh process, with ``peak_memory`` added: MiB of the whole process, or on a GPU of
    torch's allocator. Function and arguments must be importable and picklable."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_peak_memory, function, arguments).result()


def _with_peak_memory(function: Callable[..., dict], arguments: tuple) -> dict:
    result = function(*arguments)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts KiB
    return result | {"peak_memory": peak}


class Stopwatch:
    """``with Stopwatch() as watch: ...``, then ``watch.seconds``."""

    def __enter__(self) -> "Stopwatch":
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
