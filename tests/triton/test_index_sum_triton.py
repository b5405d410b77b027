"""The Triton kernel behind fastenc.ops._index_sum: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops._index_sum import index_sum
from tests.helpers.index_sum import check_budget


@pytest.mark.parametrize(
    "count,width,size", [(1, 1, 1), (7, 37, 2), (200, 96, 70), (150, 130, 200)]
)
def test_sums_keep_the_budget(triton_target, count, width, size):
    for dtype in triton_target.dtypes:
        check_budget(dtype, count, width, size, triton_target.device)


def test_repeats_bit_for_bit_and_nothing_to_add(triton_target):
    rows = torch.randn(300, 40, device=triton_target.device)
    index = torch.randint(3, (300,), device=rows.device)
    ours = index_sum(rows, index, 3, 0, -1)
    assert torch.equal(index_sum(rows, index, 3, 0, -1), ours)
    assert index_sum(rows[:0], index[:0], 3, 0, -1).eq(0).all()
    torch.library.opcheck(torch.ops.fastenc.index_sum.default, (rows, index, 3, 0, -1))
