import pytest
import torch

from fastenc.nn.ways.fused_sublayers import run_fused_sublayers
from fastenc.ops.column_sum import column_sum
from fastenc.testing import assert_within_budget
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import KINDS, Layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (130, 1536), (3000, 20)])
def test_sums_keep_the_budget(instruction_set, rows, width, dtype):
    x = torch.randn(rows, width).to(dtype)
    ours = column_sum(x)
    assert ours.dtype == torch.float32
    # The budget of a float32 sum for any dtype of x.
    assert_within_budget(ours, x.float().sum(0), x.double().sum(0), "sum")
    strided = x.repeat_interleave(2, dim=1)[:, ::2]
    assert not strided.is_contiguous() or width == 1
    torch.testing.assert_close(column_sum(strided), ours, rtol=0, atol=0)


@needs_cpp
def test_no_rows_no_columns_and_nan_in_its_column():
    assert column_sum(torch.zeros(0, 5)).tolist() == [0.0] * 5
    assert column_sum(torch.zeros(5, 0)).shape == (0,)
    x = torch.ones(70, 40)
    x[3, 7] = float("nan")
    assert column_sum(x).isnan().nonzero().flatten().tolist() == [7]


@needs_cpp
def test_result_does_not_depend_on_the_number_of_threads():
    x, before, sums = torch.randn(2000, 300), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sums.append(column_sum(x))
    torch.set_num_threads(before)
    assert torch.equal(*sums)


@needs_cpp
def test_registration_passes_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.fastenc.column_sum.default, (torch.randn(6, 24).to(dtype),))


@needs_cpp
def test_under_autocast_a_layers_bias_gradient_is_not_rounded_to_bfloat16():
    """Under autocast the weights stay float32, and so do their gradients."""
    layer = Layer(KINDS["bert"], (12,))
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = layer.run(run_fused_sublayers)
    bias = layer.values["value_bias"]
    (gradient,) = torch.autograd.grad(y.float().square().sum() + y.float().sum(), bias)
    assert gradient.dtype == torch.float32 and not torch.equal(
        gradient, gradient.bfloat16().float()
    )
