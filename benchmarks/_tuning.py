"""How benchmarks name the problems whose launches ``benchmarks.tune`` times."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._compare_ops import TOLERANCES
from benchmarks._device import DEVICE

TOKENS = 16384  # of a batch on a GPU
TF32_TOLERANCE = TOLERANCES[torch.float16]  # TF32's significand has as many bits as float16's: 11


class Problem(NamedTuple):
    """An op at a shape to tune for: op(*inputs, impl=...), differentiable in its inputs.

    Fields:
        mode: a context in which it is tuned, such as deterministic backwards.
        tolerance: largest ||result - truth|| / ||truth|| of a correct result; None: that of the inputs' dtype.
    """

    op: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    mode: Callable[[], AbstractContextManager] = nullcontext
    tolerance: float | None = None


def random_inputs(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*s, device=DEVICE).to(dtype).requires_grad_() for s in shapes)


@contextmanager
def tf32() -> Iterator[None]:
    """float32 products in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # the truth's ops may not be
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
