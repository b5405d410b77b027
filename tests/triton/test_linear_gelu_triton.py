"""The products of kernels/linear_gelu.py with their epilogues: on a GPU, or interpreted."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.testing import assert_within_budget


@pytest.mark.parametrize("rows,inner,width", [(1, 16, 8), (130, 40, 200), (129, 64, 136)])
def test_values_and_gradients_keep_the_budget(triton_target, rows, inner, width):
    kernels = pytest.importorskip("fastenc.kernels.linear_gelu")
    half = [dtype for dtype in triton_target.dtypes if dtype != torch.float32]
    for dtype in half:
        new = lambda *shape, dtype=dtype: torch.randn(*shape, device=triton_target.device).to(dtype)
        x, weight, bias, dy, below = (
            new(rows, inner),
            new(width, inner) / inner**0.5,
            new(width),
            new(rows, inner),
            new(inner, width) / inner**0.5,
        )
        bias.requires_grad_()
        wide = bias.detach().double().requires_grad_()
        y, u = kernels.linear_gelu_forward(x, weight, bias.detach())
        plain_u = F.linear(x, weight, bias)
        exact_u = F.linear(x.double(), weight.double(), wide)
        assert_within_budget(u, plain_u, exact_u, f"{dtype} u")
        plain, truth = F.gelu(plain_u), F.gelu(exact_u)
        assert_within_budget(y, plain, truth, f"{dtype} y")
        du, dbias = kernels.linear_gelu_backward(dy, below, u)
        inner_gradient, exact_gradient = dy @ below, dy.double() @ below.double()
        theirs = torch.autograd.grad(plain, (plain_u, bias), inner_gradient)
        exact = torch.autograd.grad(truth, (exact_u, wide), exact_gradient)
        assert_within_budget(du, theirs[0], exact[0], f"{dtype} du")
        assert_within_budget(dbias.to(dtype), theirs[1], exact[1], f"{dtype} dbias")


def test_no_rows(triton_target):
    kernels = pytest.importorskip("fastenc.kernels.linear_gelu")
    new = lambda *shape: torch.randn(*shape, device=triton_target.device).half()
    y, u = kernels.linear_gelu_forward(new(0, 16), new(8, 16), new(8))
    assert y.shape == u.shape == (0, 8)
    du, dbias = kernels.linear_gelu_backward(new(0, 16), new(16, 8), u)
    assert du.shape == (0, 8) and torch.equal(dbias, torch.zeros_like(dbias))
