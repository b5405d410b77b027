"""Masked cross-entropy, 2,048 x 30,522 with 15 % labelled: loss and gradient, time and memory.

Timed twice, in processes of their own: with the default allocator, which takes every large buffer fresh from the
system, and with glibc's tuned to recycle them (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_), which spares
torch most of its page faults. Peak memory is the growth of the process's largest resident size over one call.
"""

import json
import os
import resource
import subprocess
import sys

import torch
import torch.nn.functional as F

from benchmarks._harness import compare, write
from fastenc.ops import masked_cross_entropy

ROWS, VOCABULARY, SHARE = 2048, 30522, 0.15
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
LOSSES = {
    "F.cross_entropy": F.cross_entropy,
    "gather, F.cross_entropy": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "fastenc": masked_cross_entropy,
}


def inputs(dtype: torch.dtype):
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,))
    return logits, torch.where(torch.rand(ROWS) < SHARE, labels, -100)


def step(loss_of, logits, labels):
    loss = loss_of(logits, labels)
    loss.backward()
    gradient, logits.grad = logits.grad, None
    return loss.detach(), gradient


def measure_time() -> dict:
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = inputs(dtype)
        wide = logits.detach().double()[labels != -100].requires_grad_()
        truth, exact = step(F.cross_entropy, wide, labels[labels != -100])
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2

        def check(_, result):
            loss, gradient = result
            error = (gradient[labels != -100].double() - exact).abs().max() / exact.abs().max()
            wrong = not error < tolerance or not abs(loss - truth) < 10 * tolerance
            return f"loss {loss}, relative gradient error {error:.2g}" if wrong else None

        cases[str(dtype).removeprefix("torch.")] = compare(
            {
                name: lambda loss_of=loss_of: step(loss_of, logits, labels)
                for name, loss_of in LOSSES.items()
            },
            baseline="F.cross_entropy",
            check=check,
            seconds=10,
        )
    return cases


def measure_memory(provider: str) -> dict:
    logits, labels = inputs(torch.float32)
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


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure_time() if sys.argv[1] == "time" else measure_memory(sys.argv[1])))
        return
    cases = {}
    for allocator, environment in (("default allocator", {}), ("tuned allocator", TUNED)):
        for dtype, rows in in_own_process("time", environment).items():
            cases[f"{dtype}, {allocator}"] = rows
    labelled = int((inputs(torch.float32)[1] != -100).sum())
    cases["memory, float32"] = {name: in_own_process(name, {}) for name in LOSSES} | {
        "gradient of the labelled rows, MB": labelled * VOCABULARY * 4 / 2**20,
    }
    write("masked_cross_entropy", cases)
    for name, row in cases["memory, float32"].items():
        print(f"    {name}: {row}")


if __name__ == "__main__":
    main()
