"""Each op: microseconds, the roofline's lower bound, percent of it; forward as in training, and backward."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import _compare
from benchmarks._cases import Case
from benchmarks._compare import Prepared
from benchmarks.gpu_quick import problems
from benchmarks.gpu_quick.problems import Problem, Size, random_like

LIMIT = 40
SECONDS = 0.3  # of timing a case


def cases(size: Size) -> Iterator[Case]:
    for name, make in problems.problems(size):
        yield name, partial(time_op, name, make)


def time_op(name: str, make: Callable[[], Problem]) -> dict[str, Any]:
    """{direction: row}. The forward keeps what the gradients need, and forms a loss's gradient: without, some ops
    would take other kernels."""
    problem = make()
    forward = partial(problem.run, *problem.inputs, impl="auto")
    dout = random_like(forward())
    gradients = lambda out: torch.autograd.grad(out, problem.inputs, dout)
    directions = {"forward": (forward, problem.forward)}
    if problem.backward is not None:
        directions["backward"] = (Prepared(forward, gradients), problem.backward)
    results = {}
    for direction, (timed, least) in directions.items():
        rows = _compare.compare({"fastenc": timed}, baseline="fastenc", work=least, seconds=SECONDS)
        results[direction] = rows["fastenc"]
        print(line(f"{name}, {direction}", rows["fastenc"]), flush=True)
    reasons = [row["failed"] for row in results.values() if "failed" in row]
    return results | ({"failed": reasons[0]} if reasons else {})


def line(name: str, row: dict[str, Any]) -> str:
    if "median_ms" not in row:
        return f"  {name:48} {row}"
    text = f"  {name:48} {row['median_ms'] * 1e3:9.1f} us"
    if "floor_ms" in row:
        text += f"  floor {row['floor_ms'] * 1e3:8.1f}  {row['percent_of_roofline']:5.1f} %"
    return text
