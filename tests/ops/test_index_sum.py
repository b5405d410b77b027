import pytest
import torch

from fastenc.ops._index_sum import index_sum
from tests.helpers.extension import needs_cpp
from tests.helpers.index_sum import check_budget


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count,width,size", [(1, 1, 1), (7, 37, 2), (3000, 96, 70)])
def test_sums_keep_the_budget(count, width, size, dtype):
    check_budget(dtype, count, width, size)


@needs_cpp
def test_nothing_to_add_nan_in_its_row_and_opcheck():
    rows, index = torch.ones(70, 40), torch.arange(70) % 5
    assert index_sum(rows[:0], index[:0], 3, 0, -1).eq(0).all()
    torch.library.opcheck(torch.ops.fastenc.index_sum.default, (rows, index, 5, 0, -1))
    rows[3, 7] = float("nan")
    assert index_sum(rows, index, 5, 0, -1).isnan().nonzero().tolist() == [[3, 7]]
