"""GELU(x + bias), forward and backward, at encoders' widths."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compiled
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.ops import bias_gelu
from fastenc.profiling import Work

TABLES = {"bias_gelu": "GELU(x + bias)"}
SMALLEST = (8, torch.float32)  # the shape that the tests measure
ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"MiniLM": 1536, "BERT-base": 3072, **({"BERT-large": 4096} if ON_GPU else {})}


def eager(x, bias):
    return F.gelu(x + bias)


def measure(name: str, width: int, dtype: torch.dtype) -> dict[str, dict]:
    new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
    one = ROWS * width * dtype.itemsize
    return compare_functions(
        name,
        {"fastenc": bias_gelu, "eager": eager, "torch.compile": compiled(eager)},
        (new(ROWS, width).requires_grad_(), new(width).requires_grad_()),
        new(ROWS, width),
        forward=Work(2 * one, dtype=dtype),  # x read, y written
        backward=Work(3 * one, dtype=dtype),  # dy and x read, dx written
    )


def main() -> None:
    groups = {}
    for model, width in WIDTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{model} {ROWS:,} x {width:,} {dtype_name(dtype)}"
            groups[name] = partial(measure, name, width, dtype)
    run_groups("bias_gelu", groups)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    for width in (3072, 4096, 1536):
        yield partial(gelu_problem, TOKENS, width, dtype)


def gelu_problem(rows: int, width: int, dtype: torch.dtype) -> Problem:
    return Problem("bias_gelu", bias_gelu, random_inputs(dtype, (rows, width), (width,)))


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    one = size.tokens * 4 * size.width
    least = problems.work(2 * one), problems.work(3 * one)
    yield "bias_gelu", partial(problems.problem, "bias_gelu", size.of(size.short()), *least)


if __name__ == "__main__":
    main()
