"""What every benchmark shares: correctness first, alternating runs, medians, JSON.

A provider whose result is wrong is reported as wrong, without a time. Runs of the providers alternate in one
process, so that a drift of the machine's speed hits all of them alike; quote the ratios.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
TURN, PAUSE = 0.05, 0.02  # seconds
LIBRARIES = ("fastenc", "torch", "transformers", "onnxruntime", "openvino", "numpy")


def machine() -> dict:
    """The device and the versions that the figures belong to."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def folder_of_device() -> str:
    """Results of this kind of device go into benchmarks/results/<this>."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{os.cpu_count()}-cores"


def compare(
    providers: dict[str, Callable[[], object]],
    *,
    baseline: str,
    check: Callable[[str, object], str | None] | None = None,
    seconds: float = 4.0,
    min_rounds: int = 5,
) -> dict:
    """Time the providers in turn. A turn starts after a pause, in which another provider's threads stop spinning; a
    short call gets a turn of ``TURN`` seconds, of which the first call is left out and the mean counts.

    Args:
        baseline: the provider that the ratios divide.
        check: called with a provider's name and its result; returns what is wrong, or None.
        seconds: about how long the timing of all providers together lasts.
    Returns: {provider: {"median_ms", "p20_ms", "p80_ms", "speedup"}} or {"wrong": why}.
    """
    results: dict[str, dict] = {}
    alive, repeats = {}, {}
    for name, call in providers.items():
        problem = check(name, call()) if check else None
        if problem:
            results[name] = {"wrong": problem}
        else:
            start = time.perf_counter()
            call()
            repeats[name] = math.ceil(TURN / (time.perf_counter() - start))
            alive[name] = call
    times: dict[str, list[float]] = {name: [] for name in alive}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds or (time.perf_counter() < end and rounds < 1000):
        for name, call in alive.items():
            time.sleep(PAUSE)
            if repeats[name] > 1:
                call()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
        rounds += 1
    for name, values in times.items():
        values.sort()
        results[name] = {
            "median_ms": statistics.median(values) * 1e3,
            "p20_ms": values[len(values) // 5] * 1e3,
            "p80_ms": values[-1 - len(values) // 5] * 1e3,
            "rounds": rounds,
        }
    for row in results.values():
        if "median_ms" in row and baseline in times:
            row["speedup"] = results[baseline]["median_ms"] / row["median_ms"]
    return results


def forward_and_backward(
    name: str,
    providers: dict[str, Callable[[], torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    dy: torch.Tensor,
    *,
    truth: Callable[..., torch.Tensor],
    tolerance: float,
    bytes_moved: int,
) -> dict:
    """The two cases of an op that memory bounds: forward without gradients, forward + backward.

    Args:
        providers: among them "eager", the baseline.
        inputs: what the gradients are taken of, and in float64 the arguments of ``truth``.
        tolerance: largest absolute error of a forward.
        bytes_moved: by the forward.
    """

    def check(_, result):
        error = (result.double() - truth(*(v.detach().double() for v in inputs))).abs().max().item()
        return f"error {error:.2g}" if not error < tolerance else None

    with torch.no_grad():
        forward = compare(providers, baseline="eager", check=check)
    for row in forward.values():
        if "median_ms" in row:
            row["GB_per_s"] = bytes_moved / row["median_ms"] / 1e6
    train = lambda call: lambda: torch.autograd.grad(call(), inputs, dy)
    both = compare({key: train(call) for key, call in providers.items()}, baseline="eager")
    return {f"{name}, forward": forward, f"{name}, forward + backward": both}


def write(name: str, cases: dict) -> Path:
    """Write a benchmark's cases as JSON with machine and versions, and print them as a table."""
    folder = RESULTS / folder_of_device()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")
    os.replace(temporary, path)
    print(f"\n{name} ({path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path})")
    for case, rows in cases.items():
        print(f"  {case}")
        for provider, row in rows.items():
            if not isinstance(row, dict):
                print(f"    {provider:34} {row:10.1f}")
            elif "wrong" in row:
                print(f"    {provider:34} WRONG: {row['wrong']}")
            elif "median_ms" in row:
                ratio = f"{row['speedup']:6.2f}x" if "speedup" in row else ""
                print(
                    f"    {provider:34} {row['median_ms']:10.3f} ms "
                    f"[{row['p20_ms']:.3f}, {row['p80_ms']:.3f}] {ratio}"
                )
    sys.stdout.flush()
    return path
