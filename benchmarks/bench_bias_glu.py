"""GeGLU and SwiGLU of x + bias, forward and backward, at encoders' widths."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compiled, peer
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.ops import bias_glu
from fastenc.profiling import Work

TABLES = {"bias_glu": "GeGLU and SwiGLU of x + bias"}
SMALLEST = (8, "silu", torch.float32)  # the shape that the tests measure
ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"ModernBERT-base": 1152, "BERT-base's": 3072}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}


def measure(name: str, width: int, activation: str, dtype: torch.dtype) -> dict[str, dict]:
    def eager(x, bias):
        gate, value = (x + bias).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * value

    def liger(module):
        # Its GeGLU has only the tanh form, which is another function.
        swiglu = module.liger_swiglu
        return lambda x, bias: swiglu(*(x + bias).chunk(2, dim=-1))

    functions = {
        "fastenc": lambda x, bias: bias_glu(x, bias, activation=activation),
        "eager": eager,
        "torch.compile": compiled(eager),
    }
    if ON_GPU and activation == "silu":
        functions["liger-kernel"] = peer("liger_kernel.transformers.functional", liger)
    new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
    one = ROWS * width * dtype.itemsize
    return compare_functions(
        name,
        functions,
        (new(ROWS, 2 * width).requires_grad_(), new(2 * width).requires_grad_()),
        new(ROWS, width),
        forward=Work(3 * one, dtype=dtype),  # both halves of x read, y written
        backward=Work(5 * one, dtype=dtype),  # dy and x read, dx written
    )


def main() -> None:
    groups = {}
    for model, width in WIDTHS.items():
        for activation in ACTIVATIONS:
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{model} {ROWS:,} x {width:,} {activation} {dtype_name(dtype)}"
                groups[name] = partial(measure, name, width, activation, dtype)
    run_groups("bias_glu", groups)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    yield partial(glu_problem, TOKENS, 1152, dtype)


def glu_problem(rows: int, width: int, dtype: torch.dtype) -> Problem:
    inputs = random_inputs(dtype, (rows, 2 * width), (2 * width,))
    return Problem("bias_glu", partial(bias_glu, activation="gelu"), inputs)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    one, halves = size.tokens * 4 * size.width, size.of(size.short(), inner=2 * size.width)
    least = problems.work(1.5 * one), problems.work(2.5 * one)
    yield "bias_glu", partial(problems.problem, "bias_glu", halves, *least)


if __name__ == "__main__":
    main()
