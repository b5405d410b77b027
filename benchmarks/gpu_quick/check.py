"""Every op and gradient against float64 at real sizes, with dropout: the masks are the reference's."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks._cases import Case
from benchmarks._compare_ops import TOLERANCES
from benchmarks.gpu_quick import problems
from benchmarks.gpu_quick.problems import Size, results

LIMIT = 40


def cases(size: Size) -> Iterator[Case]:
    for name, make in problems.problems(size):
        yield name, partial(check, name, make)


def errors(mine: Tensor, true: Tensor) -> tuple[float, float]:
    """(||mine - true|| / ||true||, largest ||mine - true|| of a row / the larger of its ||true|| and the rows' mean).

    The second number shows one wrong row among thousands, which the first hides. In the gradient of a table the rows of
    frequent tokens are a hundred times as large as the mean row. A vector counts as one row.
    """
    wrong, true = (torch.atleast_2d(x).flatten(0, -2) for x in (mine.double() - true, true))
    tiny = 1e-30
    whole = wrong.norm() / true.norm().clamp(min=tiny)
    norms = true.norm(dim=-1)
    rows = wrong.norm(dim=-1) / norms.clamp(min=norms.mean().clamp(min=tiny))
    return whole.item(), rows.max().item()


def check(name: str, make) -> dict:
    problem = make()
    wide = tuple(x.detach().double().requires_grad_() for x in problem.inputs)
    pairs = zip(
        results(problem, problem.inputs, "auto"), results(problem, wide, "reference"), strict=True
    )
    whole, rows = zip(*(errors(*pair) for pair in pairs), strict=True)
    tolerance = TOLERANCES[problem.inputs[0].dtype]
    # Written so that a NaN counts as wrong.
    right = all(e < tolerance for e in whole) and all(e < problem.row_tolerance for e in rows)
    print(
        f"  {'right' if right else 'WRONG':6} {name}: {max(whole):.1e}, a row {max(rows):.1e}",
        flush=True,
    )
    return {"right": right, "relative errors": whole, "largest errors of a row": rows}
