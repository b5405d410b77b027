"""Several processes compile the kernels of every op and step into Triton's cache on disk, which all processes share."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

from benchmarks._cases import Case
from benchmarks._device import ON_GPU
from benchmarks.gpu_quick import problems, steps
from benchmarks.gpu_quick.problems import Size, results
from benchmarks.tune import terminate

LIMIT = 100
PROCESSES = min(14, (os.cpu_count() or 2) - 1) if ON_GPU else 0  # 0: in this process
SEQUENCES = 4  # sequences of a step; the compiled kernels do not depend on their number


def cases(size: Size) -> Iterator[Case]:
    yield "every kernel", partial(prewarm, size)


def work_of(size: Size) -> list[tuple[str, int, int]]:
    """(op or model, its number or the length of sequences, tokens). Steps come first, because they take longest."""
    lengths = sorted({length for _, length in size.batches})
    models = [(name, length, SEQUENCES * length) for name in size.models for length in lengths]
    return models + [(name, n, 0) for n, (name, _) in enumerate(problems.problems(size))]


def compile_one(item: tuple[str, int, int], size: Size) -> str:
    name, number, tokens = item
    if tokens:
        steps.step(name, tokens, number, False, repeats=1)
        return f"step of {name}, {number}"
    _, make = list(problems.problems(size))[number]
    problem = make()
    results(problem, problem.inputs, "auto")
    return name


def prewarm(size: Size) -> dict:
    """If a process fails or crashes, only its kernels are missing; they are compiled when they are needed."""
    start, items = time.perf_counter(), work_of(size)
    wrong: dict[str, str] = {}
    if PROCESSES == 0:
        for item in items:
            compile_one(item, size)
        return {"items": len(items), "wrong": wrong}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(PROCESSES, len(items)), mp_context=context)
    try:
        waiting = {pool.submit(compile_one, item, size): item[0] for item in items}
        for done in as_completed(waiting):
            if (error := done.exception()) is not None:
                wrong[waiting[done]] = f"{type(error).__name__}: {error}"[:200]
            print(f"  {time.perf_counter() - start:5.1f} s  {waiting[done]}", flush=True)
    finally:
        terminate(pool)
    return {"seconds": time.perf_counter() - start, "items": len(items), "wrong": wrong}
