"""Masked-LM steps: milliseconds, tokens a second, the host's time; those of smaller batches also as CUDA graphs.

LARGE runs the largest batch, on a GPU only.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product

from benchmarks._cases import Case
from benchmarks._device import DEVICE, ON_GPU
from benchmarks.gpu_quick.problems import Size
from fastenc.profiling import models
from fastenc.profiling.timing import synchronize

LIMIT = 60
REPEATS = 10 if ON_GPU else 1
LARGE = ("bert-large",) if ON_GPU else ()
IN_GRAPHS = 2  # batches of a model; large ones do not need them


def cases(size: Size) -> Iterator[Case]:
    for name, (tokens, length) in product(size.models, size.batches):
        yield case(name, tokens, length), partial(step, name, tokens, length, False)
    for name in LARGE:
        tokens, length = size.batches[-1]
        yield case(name, tokens, length), partial(step, name, tokens, length, False)


def graph_cases(size: Size) -> Iterator[Case]:
    for name, (tokens, length) in product(size.models, size.batches[:IN_GRAPHS]):
        yield case(name, tokens, length), partial(step, name, tokens, length, True)


def case(name: str, tokens: int, length: int) -> str:
    return f"{name}, {tokens} tokens in sequences of {length}"


def step(name: str, tokens: int, length: int, graph: bool, repeats: int = REPEATS) -> dict:
    model = models.load(name, training=True).to(DEVICE)
    lengths = [length] * (tokens // length)
    run = models.training_step(model, lengths, DEVICE, autocast=True, graph=graph)
    for _ in range(3 if repeats > 1 else 1):
        run()
    synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    host = (time.perf_counter() - start) / repeats
    synchronize(DEVICE)
    seconds = (time.perf_counter() - start) / repeats
    print(
        f"  {case(name, tokens, length)}: {seconds * 1e3:.1f} ms, host {host * 1e3:.1f} ms, "
        f"{tokens / seconds:,.0f} tokens/s",
        flush=True,
    )
    return {"ms": seconds * 1e3, "host_ms": host * 1e3, "tokens_per_s": tokens / seconds}
