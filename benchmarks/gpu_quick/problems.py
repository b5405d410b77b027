"""Ops at real sizes, with the least work of each direction. A benchmark adds its problems with a function ``visited``:

def visited(size: Size) -> Iterator[tuple[str, Callable[[], Problem]]]: ...

:func:`problem` makes them from the inputs that the op describes.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._device import DEVICE
from fastenc.ops.cases import Draw, first_cases
from fastenc.ops.cases import Size as CaseSize
from fastenc.profiling import Work

DTYPE = torch.bfloat16
ROW_TOLERANCE = 0.1


class Size(NamedTuple):
    tokens: int
    heads: int
    vocabulary: int
    lengths: tuple[int, ...]
    models: tuple[str, ...]
    batches: tuple[tuple[int, int], ...]  # (tokens, length) of a step

    @property
    def width(self) -> int:
        return 64 * self.heads

    def of(self, lengths: Sequence[int], inner: int = 0) -> CaseSize:
        """The size that ops describe their inputs for; ``inner`` if not 4 * width."""
        sizes = self.width, inner or 4 * self.width, self.heads, 64, self.vocabulary
        return CaseSize(tuple(lengths), *sizes)

    def short(self) -> list[int]:
        longest = min(128, self.tokens)
        return [longest] * (self.tokens // longest)


class Problem(NamedTuple):
    """An op at one size.

    Fields:
        run: the op, called with the inputs and impl.
        inputs: those of floating point get gradients.
        forward, backward: the least work of each direction; None: the backward has no work.
        row_tolerance: largest error of a row of a result or gradient, relative to the row.
    """

    name: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    forward: Work
    backward: Work | None
    row_tolerance: float = ROW_TOLERANCE


def problems(size: Size) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """(name, function that makes the problem)."""
    for path in sorted(Path(__file__).parents[1].glob("bench_*.py")):
        module = import_module(f"benchmarks.{path.stem}")
        if hasattr(module, "visited"):
            yield from module.visited(size)


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE).requires_grad_()


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def work(elements: float, flops: float = 0.0) -> Work:
    return Work(elements * DTYPE.itemsize, flops, DTYPE)


def problem(op: str, size: CaseSize, forward: Work, backward: Work | None, **more: Any) -> Problem:
    """The op with the inputs that it describes for this size; ``more``: further arguments, or in the place of those."""
    case = first_cases()[op]
    draw = Draw(torch.Generator(DEVICE).manual_seed(0), DTYPE)
    inputs = case.inputs(size, draw) | more
    leaves = [name for name, value in inputs.items() if getattr(value, "requires_grad", False)]

    def run(*values: Tensor, impl: str) -> Tensor:
        return case.run(inputs | dict(zip(leaves, values, strict=True)), impl)

    return Problem(op, run, tuple(inputs[name] for name in leaves), forward, backward)


def random_like(out: Tensor) -> Tensor:
    """Output gradients that are the same for every implementation and dtype."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


def results(problem: Problem, inputs: tuple[Tensor, ...], impl: str) -> list[Tensor]:
    """The output and every gradient; each call has the same dropout masks."""
    torch.manual_seed(0)
    out = problem.run(*inputs, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, inputs, random_like(out))]
