"""gelu(x W^T + b) V^T, forward and backward: with bias and GELU in the products' epilogues, and in a separate pass."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._compare import compiled
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._environment import environment
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem
from benchmarks.gpu_quick import problems
from fastenc.ops import linear_gelu
from fastenc.ops.linear_gelu import SWITCH
from fastenc.profiling import Work

TABLES = {"linear_gelu": "GELU between two products, with bias"}
SMALLEST = (8, 12, torch.float32)  # the shape that the tests measure
ROWS = 16384 if ON_GPU else 1024
MODELS = {"MiniLM": (384, 1536), "BERT-base": (768, 3072)}
MODELS |= {"BERT-large": (1024, 4096)} if ON_GPU else {}
# Without graphs: the next replay would overwrite the results of a graph.
AUTOTUNED = "max-autotune-no-cudagraphs"


def eager(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias)), down_weight)


def switched(switch: str, *inputs: Tensor, impl: str = "auto") -> Tensor:
    """The op with the epilogues ("1"), or with PyTorch's products and a pass of bias_gelu ("0"), backward included."""
    with environment(SWITCH, switch):
        return linear_gelu(*inputs, impl=impl)


def inputs_of(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weights with which the products keep the variance at 1."""
    new = lambda *shape: torch.randn(*shape, device=DEVICE)
    weights = new(inner, width) / width**0.5, new(inner), new(width, inner) / inner**0.5
    return tuple(t.to(dtype).requires_grad_() for t in (new(rows, width), *weights))


def work(rows: int, width: int, inner: int, dtype: torch.dtype) -> tuple[Work, Work]:
    """Forward: x and weights read, the input and output of GELU kept, y written. Backward: these and dy read, three
    gradients written."""
    flops = 4 * rows * width * inner
    forward = 2 * rows * width + 2 * rows * inner + 2 * width * inner
    backward = 3 * rows * width + 2 * rows * inner + 4 * width * inner
    return (
        Work(forward * dtype.itemsize, flops, dtype),
        Work(backward * dtype.itemsize, 2 * flops, dtype),
    )


def measure(name: str, width: int, inner: int, dtype: torch.dtype) -> dict[str, dict]:
    inputs = inputs_of(ROWS, width, inner, dtype)
    functions: dict[str, Callable[..., Tensor]] = {"fastenc": partial(switched, "0")}
    if ON_GPU:
        functions["fastenc, in the epilogue"] = partial(switched, "1")
        functions["torch.compile, max-autotune"] = compiled(eager, mode=AUTOTUNED)
    functions["eager"] = eager
    forward, backward = work(ROWS, width, inner, dtype)
    dout = torch.randn(ROWS, width, device=DEVICE).to(dtype)
    return compare_functions(name, functions, inputs, dout, forward=forward, backward=backward)


def main() -> None:
    groups = {}
    for model, (width, inner) in MODELS.items():
        for dtype in (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16):
            name = f"{model} {ROWS:,} x {width:,} x {inner:,} {dtype_name(dtype)}"
            groups[name] = partial(measure, name, width, inner, dtype)
    run_groups("linear_gelu", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    """The two ways beside each other; the result decides which way "auto" takes."""
    for name, switch in (("in the epilogue", "1"), ("a pass of its own", "0")):
        yield f"linear_gelu, {name}", partial(visited_problem, size, switch)


def visited_problem(size: problems.Size, switch: str) -> problems.Problem:
    width, inner = size.width, 4 * size.width
    inputs = inputs_of(size.tokens, width, inner, problems.DTYPE)
    works = work(size.tokens, width, inner, problems.DTYPE)
    return problems.Problem("linear_gelu", partial(switched, switch), inputs, *works)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    if dtype != torch.float32:  # there are no such kernels
        for width, inner in ((768, 3072), (1024, 4096), (384, 1536)):
            yield partial(epilogue_problem, TOKENS, width, inner, dtype)


def epilogue_problem(rows: int, width: int, inner: int, dtype: torch.dtype) -> Problem:
    return Problem("linear_gelu", linear_gelu, inputs_of(rows, width, inner, dtype))


if __name__ == "__main__":
    main()
