"""Runs one measurement in a process of its own, so that its peak memory is its own too."""

import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch


def isolated(function: Callable[..., dict], *arguments: Any) -> dict:
    """Call ``function(*arguments)`` in a fresh process and add ``peak_memory`` in MiB: of the whole process, or on a
    GPU of torch's allocator. Function and arguments must be importable and picklable."""
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
    """``with Stopwatch() as watch: ...``, then ``watch.times``: {"seconds", "cpu_seconds"}. CPU seconds are what the
    process computed in that time; other work on the machine hardly changes them."""

    def __enter__(self) -> "Stopwatch":
        self._begin = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter(), time.process_time()
        names = ("seconds", "cpu_seconds")
        self.times = {n: b - a for n, a, b in zip(names, self._begin, now, strict=True)}
