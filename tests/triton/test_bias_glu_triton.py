"""The Triton kernels behind fastenc.ops.bias_glu: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import bias_glu
from fastenc.ops.activation import GATED
from fastenc.reference import bias_glu as reference
from fastenc.testing import assert_within_budget
from tests.helpers.bias_glu import plain

# In the tails e^-z is infinite, so the gate is 0; numpy warns of the overflow in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (30, 1152)])
def test_values_and_gradients_keep_the_budget(triton_target, rows, width, activation):
    device = triton_target.device
    for dtype in triton_target.dtypes:
        x = (2 * torch.randn(rows, 2 * width, device=device)).to(dtype).requires_grad_()
        bias = torch.randn(2 * width, device=device).to(dtype).requires_grad_()
        dy = torch.randn(rows, width, device=device).to(dtype)
        wide = [v.detach().double().requires_grad_() for v in (x, bias)]
        y = bias_glu(x, bias, activation=activation, impl=triton_target.impl)
        y_plain = plain(x, bias, activation)
        truth = reference.bias_glu(*wide, activation=activation)
        assert_within_budget(y, y_plain, truth, f"{dtype} y")
        ours = torch.autograd.grad(y, (x, bias), dy)
        theirs = torch.autograd.grad(y_plain, (x, bias), dy)
        exact = torch.autograd.grad(truth, wide, dy.double())
        for name, *triple in zip(("dx", "dbias"), ours, theirs, exact, strict=True):
            assert_within_budget(*triple, f"{dtype} {name}")


def test_without_bias_without_rows_and_in_the_tails(triton_target):
    device, impl = triton_target.device, triton_target.impl
    for dtype in triton_target.dtypes:
        u = torch.tensor([[-1e4, -60.0, 0.0, 60.0, 1e4]], dtype=dtype, device=device)
        x = torch.cat([u, torch.full_like(u, 3.0)], 1).requires_grad_()
        for activation in GATED:
            y = bias_glu(x, activation=activation, impl=impl)
            torch.testing.assert_close(y, plain(x, None, activation), rtol=1e-3, atol=1e-6)
            (dx,) = torch.autograd.grad(y.sum(), x)
            expected = torch.tensor([0, 0, 1.5, 3, 3], dtype=dtype, device=device)
            torch.testing.assert_close(dx[0, :5], expected, rtol=0, atol=1e-6)
    empty = torch.zeros(0, 70, device=device, requires_grad=True)
    bias = torch.zeros(70, device=device, requires_grad=True)
    bias_glu(empty, bias, impl=impl).sum().backward()
    assert empty.grad.shape == (0, 70) and bias.grad.eq(0).all()
