import pytest
import torch

from fastenc.ops.log_softmax_topk import log_softmax_topk
from fastenc.reference import log_softmax_topk as reference
from fastenc.testing import assert_within_budget
from tests.helpers.extension import needs_cpp


@pytest.mark.parametrize(
    "rows,width,count", [(1, 1, 1), (3, 7, 7), (5, 128, 4), (2, 129, 129), (64, 3001, 8)]
)
def test_values_keep_the_budget(instruction_set, rows, width, count):
    x = 3 * torch.randn(rows, width)
    values, columns = log_softmax_topk(x, count)
    truth, expected = reference.log_softmax_topk(x.double(), count)
    assert torch.equal(columns, expected)
    assert_within_budget(values, reference.log_softmax_topk(x, count)[0], truth, "softmax")
    wide = torch.randn(rows, width + 3)
    wide[:, :width] = x
    for strided in (wide[:, :width], x.repeat_interleave(2, dim=1)[:, ::2]):
        for ours, other in zip(log_softmax_topk(strided, count), (values, columns), strict=True):
            assert torch.equal(ours, other)


def test_of_equal_logits_the_first_columns_come_first(instruction_set):
    x = torch.zeros(2, 300)
    x[1, [250, 7]] = 1.0
    assert log_softmax_topk(x, 4)[1].tolist() == [[0, 1, 2, 3], [7, 250, 0, 1]]


def test_rows_with_infinities_and_nan(instruction_set):
    """A row with NaN has no log-probabilities; its columns are still columns of x."""
    x = torch.randn(4, 200)
    x[0, 5:] = -torch.inf
    x[1] = -torch.inf
    x[2, 20] = torch.nan
    values, columns = log_softmax_topk(x, 8)
    for row in (0, 3):
        expected = reference.log_softmax_topk(x[row : row + 1], 8)[0]
        torch.testing.assert_close(values[row : row + 1], expected)
    assert values[1:3].isnan().all() and torch.log_softmax(x[1:3], -1).isnan().all()
    assert all(len({*row}) == 8 and 0 <= min(row) <= max(row) < 200 for row in columns.tolist())


@needs_cpp
def test_no_rows_other_arguments_and_registration():
    assert [part.shape for part in log_softmax_topk(torch.zeros(0, 5), 2)] == [(0, 2), (0, 2)]
    for count in (0, 6):
        with pytest.raises(RuntimeError, match=rf"count must be in \[1, 5\], got {count}"):
            log_softmax_topk(torch.zeros(1, 5), count)
    with pytest.raises(RuntimeError, match="x must be float32"):
        log_softmax_topk(torch.zeros(1, 5, dtype=torch.bfloat16), 2)
    torch.library.opcheck(torch.ops.fastenc.log_softmax_topk.default, (torch.randn(6, 40), 3))
