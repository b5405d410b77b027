"""Calls timed by turns: correctness first, medians, the share of the same run's roofline.

A provider whose result is wrong is reported as wrong and gets no time. One that is not installed or refuses the case is
reported with the reason. The providers' runs alternate in one process, so that a drift of the machine's speed affects
all of them alike; quote the ratios. On a GPU an op's time is that of its kernels from a cold cache (KernelTimer), and a
model's time lasts from the call to the end of its work.
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from benchmarks._device import DEVICE, ON_GPU, ceilings
from fastenc.profiling import Work
from fastenc.profiling.timing import KernelTimer, call_seconds, synchronize

TURN, PAUSE = 0.05, 0.02  # seconds
NOT_INSTALLED = "not installed"


def peer(module: str, make: Callable[[Any], Any]) -> Any:
    """``make(module)``, or the reason why this provider is missing."""
    try:
        return make(importlib.import_module(module))
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        return NOT_INSTALLED if missing else f"{type(error).__name__}: {error}"


def compiled(function: Callable, mode: str | None = None) -> Callable:
    """torch.compile for one case. Graphs of other cases are forgotten: after some recompilations it would give up."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, mode=mode)


class Prepared(NamedTuple):
    """A call with a preparation that is not timed; on a GPU only."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]

    def __call__(self):
        return self.run(self.prepare())


def compare(
    providers: dict[str, Callable[[], object] | str],
    *,
    baseline: str,
    check: Callable[[str, Any], str | None] | None = None,
    work: Work | None = None,
    end_to_end: bool = False,
    seconds: float | None = None,
    min_rounds: int = 5,
) -> dict:
    """Time the providers by turns.

    A turn starts after a pause, in which the threads of other providers stop spinning. A short call is repeated for
    ``TURN`` seconds, and the mean counts; on a CPU without the first call.

    Args:
        providers: a call, or the reason why there is none.
        baseline: the provider whose time the speedups are relative to.
        check: called with a provider's name and its result; returns what is wrong, or None.
        work: the least bytes and FLOPs of a call, for rates and the share of the roofline.
        end_to_end: on a GPU, count the host's time too, and do not empty the cache.
        seconds: about how long the timing of all providers takes together; None: 4, on a GPU 1.
    Returns: {provider: {"median_ms", "p20_ms", "p80_ms", "rounds", "speedup", ...}}, or {"wrong": what},
        {"missing": why}, {"failed": error}.
    """
    results: dict[str, dict] = {}
    alive, turns = {}, {}
    for name, provider in providers.items():
        if isinstance(provider, str):
            results[name] = {"missing": provider}
            continue
        try:
            results[name], turns[name] = _first_calls(name, provider, check, end_to_end)
        except Exception as error:  # a peer that refuses a case must not end the run
            reason = (str(error).strip() or "no message").splitlines()[0][:150]
            results[name] = {"failed": f"{type(error).__name__}: {reason}"}
            if ON_GPU:
                torch.cuda.empty_cache()  # the call may have failed for lack of memory
            continue
        if "wrong" not in results[name]:
            alive[name] = provider
    times: dict[str, list[float]] = {name: [] for name in alive}
    end = time.perf_counter() + (seconds if seconds is not None else 1.0 if ON_GPU else 4.0)
    rounds = 0
    while alive and (rounds < min_rounds or (time.perf_counter() < end and rounds < 1000)):
        for name in alive:
            time.sleep(PAUSE)
            times[name] += turns[name]()
        rounds += 1
    for name, values in times.items():
        values.sort()
        results[name] |= {
            "median_ms": statistics.median(values) * 1e3,
            "p20_ms": values[len(values) // 5] * 1e3,
            "p80_ms": values[-1 - len(values) // 5] * 1e3,
            "rounds": rounds,
        }
    for row in results.values():
        if "median_ms" in row:
            if baseline in times:
                row["speedup"] = results[baseline]["median_ms"] / row["median_ms"]
            if work is not None:
                row |= rates(work, row["median_ms"] / 1e3)
    return results


def rates(work: Work, seconds: float) -> dict[str, float]:
    """The rates that a time means, and their share of this run's ceilings."""
    floor = ceilings().floor(work)
    figures = {
        "bytes": work.bytes,
        "GB_per_s": work.bytes / seconds / 1e9,
        "floor_ms": floor * 1e3,
        "percent_of_roofline": 100 * floor / seconds,
    }
    if work.flops:
        figures |= {"flops": work.flops, "TFLOP_per_s": work.flops / seconds / 1e12}
    return figures


def _first_calls(name: str, provider: Callable, check, end_to_end: bool):
    """A row with the peak memory, or with what is wrong; and the provider's turn."""
    row: dict[str, Any] = {}
    provider()  # compiles, and fills the provider's caches
    before = _start_of_peak()
    result = provider()
    synchronize(DEVICE)
    if ON_GPU:
        row["peak_MB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    problem = check(name, result) if check else None
    del result
    if problem:
        return {"wrong": problem}, None
    start = time.perf_counter()
    provider()
    host = time.perf_counter() - start
    synchronize(DEVICE)
    repeats = math.ceil(TURN / (time.perf_counter() - start))
    if not ON_GPU:
        return row, lambda: _cpu_turn(provider, repeats)
    if end_to_end:
        return row, lambda: call_seconds(provider, DEVICE, repeats)
    prepare, timed = provider if isinstance(provider, Prepared) else (None, provider)
    return row, lambda: _kernel_timer().seconds(timed, min(repeats, 50), host, prepare)


def _start_of_peak() -> int:
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@cache
def _kernel_timer() -> KernelTimer:
    return KernelTimer(DEVICE)


def _cpu_turn(provider: Callable, repeats: int) -> list[float]:
    if repeats > 1:
        provider()
    start = time.perf_counter()
    for _ in range(repeats):
        provider()
    return [(time.perf_counter() - start) / repeats]
