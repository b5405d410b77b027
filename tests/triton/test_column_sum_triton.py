"""The Triton kernel behind fastenc.ops.column_sum: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops.column_sum import column_sum
from fastenc.testing import assert_within_budget


@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (130, 1536), (3000, 20)])
def test_sums_keep_the_budget(triton_target, rows, width):
    for dtype in triton_target.dtypes:
        x = torch.randn(rows, width, device=triton_target.device).to(dtype)
        ours = column_sum(x)
        assert ours.dtype == torch.float32
        assert_within_budget(ours, x.float().sum(0), x.double().sum(0), f"{dtype} sum")
    assert torch.equal(column_sum(x), ours)
    torch.library.opcheck(torch.ops.fastenc.column_sum.default, (x,))
    assert column_sum(x[:0]).eq(0).all() and column_sum(x[:, :0]).shape == (0,)
