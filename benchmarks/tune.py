"""Fills this GPU's table of launch parameters, kernels/tuned/sm_<capability>.json.

fastenc bench --tune [--dtype DTYPE] [--seconds N] [--processes N] [--force] [OP ...]

The ops' benchmarks name the problems. For each problem, the tuner notes the launches whose parameters the op looks up.
It starts from the best of the kernel's own rule and the op's candidates, and changes one parameter at a time until no
change helps. A candidate that fails to compile is not timed, nor is one whose result or gradient differs from the
reference's. The rule stays unless a candidate is more than 2 % faster. The table is written after every launch, so an
interrupted run goes on where it stopped. Entries that are there are kept unless --force is given. The exit code is 75
if --seconds ended before everything was tuned.

Compiling takes most of the time. So --processes compile the first candidates of later problems while earlier ones are
timed. A run tunes for one dtype: bfloat16, in which encoders are trained and run on GPUs, unless --dtype names another.
A launch that is not tuned uses its rule.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path

import torch
from fastenc.kernels import launch
from fastenc.kernels.run import compiling_only
from torch import Tensor

from benchmarks._compare_ops import TOLERANCES
from benchmarks._device import DEVICE, ON_GPU, machine
from benchmarks._results import UNFINISHED
from benchmarks._tuning import Problem
from fastenc._base.files import write_text_atomically
from fastenc.profiling.timing import KernelTimer, synchronize

GAIN = 0.98  # of the rule's time: a smaller gain is noise
REPEATS = 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Clock = Callable[[Callable, Callable | None], float]


def problems(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    """The problems that benchmarks name in ``tuned``, then in ``tuned_rarely``, at encoders' shapes.

    Attention, which gains most, has the first name.
    """
    files = sorted(Path(__file__).parent.glob("bench_*.py"))
    modules = [import_module(f"benchmarks.{path.stem}") for path in files]
    for name in ("tuned", "tuned_rarely"):
        for module in modules:
            if hasattr(module, name):
                yield from getattr(module, name)(dtype)


def kernel_clock() -> Clock:
    """Median device time, from a cold cache."""
    timer = KernelTimer(DEVICE)

    def clock(operation: Callable, prepare: Callable | None) -> float:
        start = time.perf_counter()
        operation(*(() if prepare is None else (prepare(),)))
        host = time.perf_counter() - start
        synchronize(DEVICE)
        return statistics.median(timer.seconds(operation, REPEATS, host, prepare))

    return clock


def candidates(op: str, parameters: dict) -> Iterator[dict]:
    """The op's candidates for a launch that has ``parameters``; some are for another of its kernels."""
    for candidate in launch.registry[op].candidates:
        if candidate.keys() <= parameters.keys():
            yield {**parameters, **candidate}


def neighbours(op: str, parameters: dict) -> Iterator[dict]:
    """The op's candidates, then the launches that differ from ``parameters`` in at most one parameter."""
    yield from candidates(op, parameters)
    for parameter, values in launch.registry[op].grid.items():
        for value in values:
            yield {**parameters, parameter: value}


def compile_candidates(
    number: int, dtype: str, ops: Sequence[str] = (), impl: str = "triton"
) -> int:
    """Compile the tuner's first candidates for problem ``number``, if it is a problem of ``ops``. Starts nothing.

    Returns: the number of launches.
    """
    problem = next(islice(problems(DTYPES[dtype]), number, None))()
    if ops and problem.op not in ops:
        return 0
    asked: dict[tuple[str, launch.Key], dict] = {}

    def note(tunable, key, rule):
        return asked.setdefault((tunable.op, key), rule)

    def both() -> None:
        out = problem.run(*problem.inputs, impl=impl)
        torch.autograd.grad(out, problem.inputs, torch.empty_like(out))

    tried = 0
    with problem.mode(), compiling_only():
        with launch.overruled(note):
            both()
        for place, rule in asked.items():
            for candidate in neighbours(place[0], rule):
                tried += 1
                with launch.overruled(answering(place, candidate)), suppress(Exception):
                    both()  # one that does not compile fails again when it is timed
    return tried


def answering(place: tuple[str, launch.Key], candidate: dict) -> Callable:
    """Launches of ``place`` use the candidate, all others their rule."""
    return lambda tunable, key, rule: candidate if (tunable.op, key) == place else rule


def compiled_ahead(
    dtype: str, processes: int, ops: Sequence[str]
) -> Iterator[Callable[[], Problem]]:
    """The problems, each as soon as processes have compiled its first candidates."""
    makers = list(problems(DTYPES[dtype]))
    if processes == 0:
        yield from makers
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(compile_candidates, n, dtype, ops) for n in range(len(makers))]
        try:
            for make, compiled in zip(makers, waiting, strict=True):
                # If a compiler crashed, the other launches compile when they are timed.
                with suppress(BrokenProcessPool):
                    compiled.result()
                yield make
        finally:
            terminate(pool)


def terminate(pool: ProcessPoolExecutor) -> None:
    """End the pool's processes while they compile: they would slow down what is timed next."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)


class Tuner:
    """Tunes problem after problem into one table.

    Args:
        impl: the implementation whose launches are tuned.
        keep: whether to keep the entries of an existing table.
    """

    def __init__(self, path: Path, clock: Clock, *, impl: str = "triton", keep: bool = True):
        self.path, self.clock, self.impl, self.keep = path, clock, impl, keep
        self.entries: dict[tuple[str, launch.Key], dict] = {}
        if path.is_file():
            for entry in json.loads(path.read_text())["entries"]:
                self.entries[entry["op"], tuple(sorted(entry["key"].items()))] = entry
        self.tuned: set[tuple[str, launch.Key]] = set(self.entries) if keep else set()

    def tune(self, problem: Problem, until: float = float("inf")) -> bool:
        """Both directions; stops between launches once ``time.monotonic()`` is past ``until``.

        Returns: whether every launch has its entry.
        """
        with problem.mode():
            return self._tune_both(problem, until)

    def _tune_both(self, problem: Problem, until: float) -> bool:
        exact = tuple(v.detach().double().requires_grad_() for v in problem.inputs)
        out = self._seeded(problem, exact, "reference")
        dout = torch.randn_like(out)
        truth = torch.autograd.grad(out, exact, dout)
        low = dout.to(problem.inputs[0].dtype)
        forward = lambda: self._seeded(problem, problem.inputs, self.impl)
        backward = lambda y: torch.autograd.grad(y, problem.inputs, low)
        return self._tune(problem, forward, None, (out.detach(),), until) and self._tune(
            problem, backward, forward, truth, until
        )

    def _seeded(self, problem: Problem, inputs: tuple[Tensor, ...], impl: str) -> Tensor:
        torch.manual_seed(0)  # the same dropout mask every time
        return problem.run(*inputs, impl=impl)

    def _tune(
        self, problem: Problem, operation, prepare, truth: tuple[Tensor, ...], until: float
    ) -> bool:
        asked: dict[tuple[str, launch.Key], dict] = {}

        def note(tunable, key, rule):
            asked.setdefault((tunable.op, key), rule)
            return rule

        argument = () if prepare is None else (prepare(),)
        with launch.overruled(note):
            operation(*argument)
        for launched, rule in asked.items():
            if launched in self.tuned:
                continue
            if time.monotonic() > until:
                return False
            self._tune_launch(launched, rule, problem, operation, prepare, truth)
        return True

    def _tune_launch(
        self, launched, rule: dict, problem: Problem, operation, prepare, truth
    ) -> None:
        op, key = launched
        tried: dict[str, float] = {}  # parameters → seconds, infinite if unusable

        def seconds(candidate: dict) -> float:
            name = json.dumps(candidate, sort_keys=True)
            if name not in tried:
                tried[name] = self._measure(launched, candidate, problem, operation, prepare, truth)
            return tried[name]

        rule_seconds = seconds(rule)
        if rule_seconds == math.inf:
            raise RuntimeError(f"{op} {dict(key)}: the rule's own {rule} fails or is wrong")
        best, previous = min([rule, *candidates(op, rule)], key=seconds), None
        while best != previous:
            previous = best
            for parameter, values in launch.registry[op].grid.items():
                best = min([best, *({**best, parameter: v} for v in values)], key=seconds)
        if seconds(best) > GAIN * rule_seconds:
            best = rule
        self.entries[launched] = {
            "op": op,
            "key": dict(key),
            "launch": best,
            "us": seconds(best) * 1e6,
            "rule_us": rule_seconds * 1e6,
        }
        self.tuned.add(launched)
        self.write()
        unusable = sum(value == math.inf for value in tried.values())
        print(
            f"{op} {dict(key)}: {best}, {seconds(best) * 1e6:.1f} us; the rule {rule_seconds * 1e6:.1f} us; "
            f"{len(tried)} tried, {unusable} unusable",
            flush=True,
        )

    def _measure(
        self, launched, candidate: dict, problem: Problem, operation, prepare, truth
    ) -> float:
        with launch.overruled(answering(launched, candidate)):
            try:
                result = operation(*(() if prepare is None else (prepare(),)))
                tolerance = problem.tolerance or TOLERANCES[problem.inputs[0].dtype]
                right = self._right(result, truth, tolerance)
                return self.clock(operation, prepare) if right else math.inf
            except Exception:  # too much shared memory, a shape that the compiler refuses
                return math.inf

    @staticmethod
    def _right(result, truth: tuple[Tensor, ...], tolerance: float) -> bool:
        results = (result,) if isinstance(result, Tensor) else result
        # Written so that a NaN counts as wrong.
        return all(
            ((value.detach().double() - true).norm() <= tolerance * true.norm()).item()
            for value, true in zip(results, truth, strict=True)
        )

    def write(self) -> None:
        """The table so far, in place of the old one."""
        ordered = sorted(self.entries.values(), key=lambda e: (e["op"], json.dumps(e["key"])))
        text = json.dumps({"machine": machine(), "entries": ordered}, indent=1) + "\n"
        self.path.parent.mkdir(exist_ok=True)
        write_text_atomically(self.path, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "fastenc bench --tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--processes",
        type=int,
        default=min(14, cores - 1),
        help="that compile ahead (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="tune again what the table has")
    given = parser.parse_args(arguments)
    if not ON_GPU:
        parser.error("tuning times kernels on a GPU, and torch sees none here")
    until = time.monotonic() + given.seconds
    path = launch.TABLES / f"{launch.architecture(torch.device('cuda', 0))}.json"
    tuner = Tuner(path, kernel_clock(), keep=not given.force)
    finished = True
    for make in compiled_ahead(given.dtype, given.processes, given.ops):
        problem = make()
        if given.ops and problem.op not in given.ops:
            continue
        finished = tuner.tune(problem, until)
        if not finished:
            print("the time is up; the next run goes on here")
            break
    print(f"{len(tuner.entries)} entries in {path}")
    return 0 if finished else UNFINISHED


if __name__ == "__main__":
    raise SystemExit(main())
