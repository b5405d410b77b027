"""Every op computes views, such as w[::2] or a transposed matrix, like contiguous tensors of the same values."""

from dataclasses import replace

import pytest
import torch

from fastenc.testing import CASES, numerics_report


def strided(value):
    """The same values, with other values between them."""
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    return torch.stack([value, torch.full_like(value, 7)], dim=-1)[..., 0]


def by_columns(value):
    """The same values with a transposed layout: the first dimension is contiguous."""
    if not torch.is_tensor(value) or value.dim() < 2:
        return value
    return value.mT.contiguous().mT


LAYOUTS = pytest.mark.parametrize("layout", [strided, by_columns], ids=["strided", "by columns"])


def broken_quantities(case, layout):
    ours = lambda **inputs: case.ours(**{name: layout(v) for name, v in inputs.items()})
    rows = numerics_report(dtypes=[torch.float32], cases=[replace(case, ours=ours)])
    return [(row.quantity, row.error, row.allowed) for row in rows if not row.holds]


@LAYOUTS
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.detail}".strip())
def test_values_and_gradients_keep_the_budget(case, layout):
    assert broken_quantities(case, layout) == []
