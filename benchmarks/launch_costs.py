"""What the host spends on the launches of each op's kernels, without a GPU.

    python -m benchmarks.launch_costs [--seconds 0.2]

Kernels are compiled for sm_90 and everything of a call happens but the launches themselves (_stub_driver.py). Prints
JSON: medians of the time of an op's call, which includes the allocation of its results, and of each of its launches
alone; and the variants of each kernel that were compiled up to each number of tokens, with whether each uses fused
multiply-adds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from fastenc.kernels import run as launches

from benchmarks import _stub_driver  # noqa: F401
from fastenc.ops.cases import Case, Draw, Size, first_cases
from fastenc.ops.library import triton_kernels
from fastenc.testing.operators import OperatorCalls, triton_kernels_on_cpu

SIZE = Size((64,), width=64, inner=64, heads=1, head_dim=64, vocabulary=200)
# Tokens of batches: one, a multiple of 16, neither.
TOKENS = (1, 64, 65, 130)
LONGEST = (128, 512)  # short sequences have kernels of their own


def calls(tokens: int) -> Iterator[tuple[str, Callable]]:
    """(operator, a call of it), for all that each op calls on a sequence of ``tokens`` tokens, forward and backward."""
    with triton_kernels_on_cpu():
        for longest in (n for n in LONGEST if n >= tokens):
            size = SIZE._replace(lengths=(tokens,), max_seqlen=longest)
            for op, case in first_cases().items():
                # What does not depend on the longest sequence is called once.
                if longest == LONGEST[-1] or op == "attention":
                    yield from operator_calls(case, size)
        x, offsets = torch.randn(tokens, SIZE.width).bfloat16(), torch.tensor([0, tokens]).int()
        yield "column_sum", partial(triton_kernels["column_sum"], x)
        yield (
            "attention_blocks",
            partial(triton_kernels["attention_blocks"], offsets, tokens, tokens),
        )


def operator_calls(case: Case, size: Size) -> Iterator[tuple[str, Callable]]:
    """The case in bfloat16, with dropout where it has one."""
    inputs = case.inputs(size, Draw(torch.Generator().manual_seed(0), torch.bfloat16))
    if "dropout_p" in inputs:
        inputs["dropout_p"] = 0.1
    with OperatorCalls() as made:
        out = case.run(inputs)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    for function, (arguments, _) in made.arguments.items():
        operator = function.name().split("::")[1]
        if operator in triton_kernels:
            run = partial(triton_kernels[operator], *arguments)
            yield f"{case.op}, up to {size.longest}: {operator}", run


def launches_of(run: Callable) -> list[tuple[str, Callable]]:
    """(kernel, its launch alone) of what a call launches."""
    recorded = []

    def noting(kernel, *arguments, **named):
        recorded.append((kernel.__name__, partial(launches.run, kernel, *arguments, **named)))
        launches.run(kernel, *arguments, **named)

    modules = [m for name, m in sys.modules.items() if name.startswith("fastenc.kernels.")]
    importing = [
        m for m in modules if getattr(m, "run", None) is launches.run and m is not launches
    ]
    for module in importing:
        module.run = noting
    run()
    for module in importing:
        module.run = launches.run
    return recorded


def median_time(run: Callable, seconds: float) -> float:
    """The median time of a call in microseconds. Each measurement is a batch of ten calls."""
    end, times = time.perf_counter() + seconds, []
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            run()
        times.append((time.perf_counter() - start) / 10)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing an op")
    seconds = parser.parse_args().seconds
    costs: dict[str, float] = {}
    bare: dict[str, float] = {}
    compiled = {}
    for tokens in TOKENS:
        for name, run in calls(tokens):
            run()
            if tokens == 64:
                costs[name] = median_time(run, seconds)
                for kernel, launch in launches_of(run):
                    bare[kernel] = median_time(launch, seconds)
        compiled[tokens] = {
            signature.kernel: [c.metadata.enable_fp_fusion for c in signature.compiled.values()]
            for signature in launches.signatures()
        }
    report = {
        "microseconds a call": costs,
        "microseconds a launch": bare,
        "median launch": statistics.median(bare.values()),
        "variants": compiled,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
