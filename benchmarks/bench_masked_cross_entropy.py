"""Masked cross-entropy over full logits with 15 % labelled: loss and gradient, time and memory.

On a CPU it is timed twice, each in its own process: with the default allocator, which takes every large buffer fresh
from the system, and with glibc's allocator tuned to recycle buffers (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_),
which saves torch most of its page faults. Peak memory on a CPU is the growth of the process's largest resident size
over one call.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compare, compiled, peer
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks.gpu_quick import problems
from fastenc.ops import masked_cross_entropy
from fastenc.profiling import Work

SHARE = 0.15
# rows, vocabulary: BERT's; on a GPU also a multiple of 64, and XLM-R's
SHAPES = [(16384, 30522), (16384, 30528), (4096, 250112)] if ON_GPU else [(2048, 30522)]
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


def gathered(logits, labels):
    chosen = labels != -100
    return F.cross_entropy(logits[chosen], labels[chosen])


LOSSES = {
    "F.cross_entropy": F.cross_entropy,
    "gather, F.cross_entropy": gathered,
    "fastenc": masked_cross_entropy,
}


def work(labelled: int, rows: int, vocabulary: int, dtype: torch.dtype) -> Work:
    """Labelled logits are read. Their gradient and the zeros of ignored rows are written."""
    return Work((labelled + rows) * vocabulary * dtype.itemsize, dtype=dtype)


def inputs(rows: int, vocabulary: int, dtype: torch.dtype):
    torch.manual_seed(0)
    logits = torch.randn(rows, vocabulary, device=DEVICE).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,))
    labels = torch.where(torch.rand(rows) < SHARE, labels, -100)
    return logits, labels.to(DEVICE)


def step(loss_of, logits, labels):
    loss = loss_of(logits, labels)
    loss.backward()
    gradient, logits.grad = logits.grad, None
    return loss.detach(), gradient


def liger(module):
    return lambda logits, labels: module.liger_cross_entropy(logits, labels)


def measure_time(rows: int, vocabulary: int) -> dict:
    dtypes = (torch.float32, torch.bfloat16)
    return {dtype_name(dtype): measure_dtype(rows, vocabulary, dtype) for dtype in dtypes}


def measure_dtype(rows: int, vocabulary: int, dtype: torch.dtype) -> dict:
    logits, labels = inputs(rows, vocabulary, dtype)
    chosen = labels != -100
    wide = logits.detach()[chosen].double().requires_grad_()
    truth, exact = step(F.cross_entropy, wide, labels[chosen])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2

    def check(_, result):
        loss, gradient = result
        error = (gradient[chosen].double() - exact).abs().max() / exact.abs().max()
        ignored = gradient[~chosen].count_nonzero().item()
        wrong = not error < tolerance or not abs(loss - truth) < 10 * tolerance or ignored
        return f"loss {loss}, relative gradient error {error:.2g}" if wrong else None

    losses: dict = dict(LOSSES)
    if ON_GPU:
        losses["torch.compile"] = compiled(F.cross_entropy)
        losses["liger-kernel"] = peer("liger_kernel.transformers.functional", liger)
    calls = {}
    for name, loss_of in losses.items():
        # Liger overwrites its logits with the gradient, so it gets a copy of its own.
        own = logits.detach().clone().requires_grad_() if name == "liger-kernel" else logits
        calls[name] = (
            loss_of
            if isinstance(loss_of, str)
            else lambda loss_of=loss_of, own=own: step(loss_of, own, labels)
        )
    return compare(
        calls,
        baseline="F.cross_entropy",
        check=check,
        work=work(int(chosen.sum()), rows, vocabulary, dtype),
        seconds=2 if ON_GPU else 10,
    )


def measure_memory(provider: str) -> dict:
    logits, labels = inputs(*SHAPES[0], torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(LOSSES[provider], logits, labels)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_MB_above_inputs": (peak - before) / 1024}


def in_own_process(argument: str, environment: dict) -> dict:
    command = [sys.executable, "-m", "benchmarks.bench_masked_cross_entropy", argument]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def times_on_gpu(rows: int, vocabulary: int) -> dict[str, dict]:
    times = measure_time(rows, vocabulary)
    return {f"{rows:,} x {vocabulary:,} {dtype}": row for dtype, row in times.items()}


def times_on_cpu(allocator: str, environment: dict) -> dict[str, dict]:
    times = in_own_process("time", environment)
    return {f"{dtype}, {allocator}": rows for dtype, rows in times.items()}


def memory_on_cpu() -> dict[str, dict]:
    labelled = int((inputs(*SHAPES[0], torch.float32)[1] != -100).sum())
    rows = {name: in_own_process(name, {}) for name in LOSSES}
    return {
        "memory, float32": {
            **rows,
            "gradient of the labelled rows, MB": labelled * SHAPES[0][1] * 4 / 2**20,
        }
    }


def main() -> None:
    if len(sys.argv) > 1:
        argument = sys.argv[1]
        result = measure_time(*SHAPES[0]) if argument == "time" else measure_memory(argument)
        print(json.dumps(result))
        return
    if ON_GPU:
        groups = {
            f"{rows:,} x {vocabulary:,}": partial(times_on_gpu, rows, vocabulary)
            for rows, vocabulary in SHAPES
        }
    else:
        groups = {
            "default allocator": partial(times_on_cpu, "default allocator", {}),
            "tuned allocator": partial(times_on_cpu, "tuned allocator", TUNED),
            "memory": memory_on_cpu,
        }
    run_groups("masked_cross_entropy", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    yield "masked_cross_entropy", partial(visited_problem, size)


def visited_problem(size: problems.Size) -> problems.Problem:
    """Every row has a label. The gradient is formed with the loss."""
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    least = problems.work(2 * rows * size.vocabulary), None
    return problems.problem("masked_cross_entropy", size.of([rows]), *least, labels=labels)


if __name__ == "__main__":
    main()
