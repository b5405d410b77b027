"""The Triton kernels behind fastenc.ops.segment_pool: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import segment_pool
from tests.helpers.segment_pool import MODES, check_against_plain, offsets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths,width", [([1], 1), ([5, 1, 33], 70), ([127, 64, 65], 64)])
def test_values_and_gradient_keep_the_budget(triton_target, lengths, width, mode):
    for dtype in triton_target.dtypes:
        check_against_plain(lengths, width, dtype, mode, triton_target.impl, triton_target.device)


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_give_zeros(triton_target, mode):
    device, impl = triton_target.device, triton_target.impl
    x = torch.randn(6, 19, device=device, requires_grad=True)
    y = segment_pool(x, offsets([0, 2, 0, 0, 4, 0], device), mode, impl=impl)
    full = segment_pool(x, offsets([2, 4], device), mode, impl=impl)
    assert not y[[0, 2, 3, 5]].any() and torch.equal(y[[1, 4]], full)
    (ours,), (expected,) = (torch.autograd.grad(v.sum(), x) for v in (y, full))
    assert torch.equal(ours, expected)
    nothing = torch.zeros(0, 19, device=device, requires_grad=True)
    y = segment_pool(nothing, offsets([0, 0], device), mode, impl=impl)
    assert y.shape == (2, 19) and not y.any()
    assert torch.autograd.grad(y.sum(), nothing)[0].shape == (0, 19)


def test_a_maximums_gradient_goes_to_its_first_token(triton_target):
    inf, nan = float("inf"), float("nan")
    rows = [[1, -inf, 0.0, nan], [3, -inf, -0.0, 1], [3, -inf, nan, 2], [2, -inf, nan, 3]]
    x = torch.tensor(rows, device=triton_target.device, requires_grad=True)
    y = segment_pool(x, offsets([4], x.device), "max", impl=triton_target.impl)
    assert torch.equal(y.nan_to_num(7), torch.tensor([[3, -inf, 7, 7]]).to(y).nan_to_num(7))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.argmax(0).tolist() == [1, 0, 2, 0] and dx.sum() == 4
    # A tie between lanes in different turns of the loop.
    x = torch.zeros(70, 64, device=x.device, requires_grad=True)
    y = segment_pool(x, offsets([70], x.device), "max", impl=triton_target.impl)
    assert torch.autograd.grad(y.sum(), x)[0][0].eq(1).all()


@pytest.mark.parametrize("mode", MODES)
def test_nan_stays_in_its_sequence(triton_target, mode):
    x = torch.randn(9, 20, device=triton_target.device)
    x[3] = float("nan")
    y = segment_pool(x, offsets([3, 4, 2], x.device), mode, impl=triton_target.impl)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
