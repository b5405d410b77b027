"""The error of each op against float64 on the current device, beside the error of plain PyTorch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastenc import ops
from fastenc.ops.cases import CASES, Case, Draw, Size
from fastenc.ops.dispatch import choose
from fastenc.testing.budget import error_budget, errors
from fastenc.testing.operators import OperatorCalls

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Between MiniLM and BERT-base, with a vocabulary that leaves the report quick.
SIZE = Size((5, 64, 33, 128), width=384, inner=3072, heads=12, head_dim=64, vocabulary=8000)


@dataclass(frozen=True)
class NumericsRow:
    """The error of one quantity of an op: its result ("forward"), or the gradient of an input (the input's name).

    Fields:
        detail: the name of the case, if the op has several.
        implementation: the implementation that ``impl="auto"`` chose.
        error: largest absolute error of the library.
        plain_error: largest absolute error of plain PyTorch in the same dtype.
        allowed: largest absolute error that the budget allows.
        holds: whether the largest and the mean error are within the budget.
    The three errors are divided by the largest absolute value of the float64 result.
    """

    op: str
    detail: str
    implementation: str
    dtype: torch.dtype
    quantity: str
    error: float
    plain_error: float
    allowed: float
    holds: bool


def numerics_report(
    device: torch.device | str | None = None,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    cases: Sequence[Case] = CASES,
    size: Size = SIZE,
) -> list[NumericsRow]:
    """Run every case forward and backward in each dtype, and compare with float64 results from the same inputs.

    Inputs are the same in every run, and torch's default random generators are not used.

    Args:
        device: None takes the first GPU, or the CPU if there is none.
        cases: the ops to measure. To add an op of your own, append a :class:`Case` to ``fastenc.testing.CASES``.
        size: of the inputs; a smaller one is for slow devices, such as emulated ones.
    Returns: a row for every quantity, in the order of the cases.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        row
        for case in cases
        for dtype in dtypes
        for row in _rows(case, torch.device(device), dtype, size)
    ]


def ops_without_case(cases: Sequence[Case] = CASES) -> list[str]:
    """The public ops that no case covers."""
    return sorted(set(ops.__all__) - {case.op for case in cases})


def _rows(
    case: Case, device: torch.device, dtype: torch.dtype, size: Size
) -> Iterator[NumericsRow]:
    if case.plain is None:
        return
    draw = Draw(torch.Generator().manual_seed(0), dtype, device)
    inputs = case.inputs(case.resize(size), draw)
    in_float64 = draw.in_float64(inputs)
    leaves = [name for name, value in inputs.items() if _is_leaf(value)]
    like = next(v for v in inputs.values() if isinstance(v, Tensor) and v.dtype == dtype)
    with OperatorCalls() as calls:
        ours = case.run(inputs)
    # "auto" takes the reference for options that the kernels do not support. Then no op of the library is called.
    implementation = choose(case.op, "auto", like) if calls.arguments else "reference"
    results = (ours, case.plain(**inputs), case.plain(**in_float64))
    quantities = [("forward", *results)]
    if results[0].requires_grad:
        upstream = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
        upstream = upstream.to(device, results[0].dtype)
        gradients = (
            torch.autograd.grad(
                result, [values[name] for name in leaves], upstream.to(result.dtype)
            )
            for result, values in zip(results, (inputs, inputs, in_float64), strict=True)
        )
        quantities += zip(leaves, *gradients, strict=True)
    for quantity, ours, plain, truth in quantities:
        max_allowed, mean_allowed = error_budget(plain, truth)
        max_error, mean_error = errors(ours, truth)
        scale = float(truth.detach().abs().max()) or 1.0
        yield NumericsRow(
            case.op,
            case.detail,
            implementation,
            dtype,
            quantity,
            max_error / scale,
            errors(plain, truth)[0] / scale,
            max_allowed / scale,
            # Written so that NaN fails.
            ours.dtype == plain.dtype and max_error <= max_allowed and mean_error <= mean_allowed,
        )


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
