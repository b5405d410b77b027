"""The Triton kernels behind fastenc.ops.bias_gelu: on a GPU, or interpreted."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import bias_gelu
from fastenc.reference import bias_gelu as reference
from fastenc.testing import assert_within_budget


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (30, 1536)])
def test_values_and_gradients_keep_the_budget(triton_target, rows, width, approximate):
    device = triton_target.device
    for dtype in triton_target.dtypes:
        x = (2 * torch.randn(rows, width, device=device)).to(dtype).requires_grad_()
        bias = torch.randn(width, device=device).to(dtype).requires_grad_()
        dy = torch.randn(rows, width, device=device).to(dtype)
        wide = [v.detach().double().requires_grad_() for v in (x, bias)]
        y = bias_gelu(x, bias, approximate=approximate, impl=triton_target.impl)
        plain = F.gelu(x + bias, approximate=approximate)
        truth = reference.bias_gelu(*wide, approximate=approximate)
        assert_within_budget(y, plain, truth, f"{dtype} y")
        ours = torch.autograd.grad(y, (x, bias), dy)
        theirs = torch.autograd.grad(plain, (x, bias), dy)
        exact = torch.autograd.grad(truth, wide, dy.double())
        for name, *triple in zip(("dx", "dbias"), ours, theirs, exact, strict=True):
            assert_within_budget(*triple, f"{dtype} {name}")


def test_in_place_without_bias_and_without_rows(triton_target):
    device, impl = triton_target.device, triton_target.impl
    x = torch.randn(3, 70, device=device)
    expected = F.gelu(x)
    torch.testing.assert_close(bias_gelu(x, impl=impl), expected, rtol=1e-6, atol=2e-6)
    assert bias_gelu(x, inplace=True, impl=impl) is x
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=2e-6)
    empty = torch.zeros(0, 70, device=device, requires_grad=True)
    bias = torch.zeros(70, device=device, requires_grad=True)
    bias_gelu(empty, bias, impl=impl).sum().backward()
    assert empty.grad.shape == (0, 70) and bias.grad.eq(0).all()
