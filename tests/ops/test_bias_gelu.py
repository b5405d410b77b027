import pytest
import torch
import torch.nn.functional as F

from fastenc import nn as fnn
from fastenc.ops import bias_gelu
from fastenc.reference import bias_gelu as reference
from fastenc.testing import assert_within_budget
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (130, 1536)])
def test_values_and_gradients_keep_the_budget(instruction_set, rows, width, dtype, approximate):
    x = (2 * torch.randn(rows, width)).to(dtype).requires_grad_()
    bias = torch.randn(width).to(dtype).requires_grad_()
    dy = torch.randn(rows, width).to(dtype)
    wide = [v.detach().double().requires_grad_() for v in (x, bias)]
    y = bias_gelu(x, bias, approximate=approximate, impl="cpp")
    plain = F.gelu(x + bias, approximate=approximate)
    truth = reference.bias_gelu(*wide, approximate=approximate)
    assert_within_budget(y, plain, truth, "y")
    ours, theirs = torch.autograd.grad(y, (x, bias), dy), torch.autograd.grad(plain, (x, bias), dy)
    exact = torch.autograd.grad(truth, wide, dy.double())
    for name, *triple in zip(("dx", "dbias"), ours, theirs, exact, strict=True):
        assert_within_budget(*triple, name)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tails_are_exact(instruction_set, dtype, approximate, impl):
    """Compared with float64: PyTorch's float32 overflows at the highest number, and its slope where the cube
    overflows."""
    far = torch.tensor([6.0, 50.0, 88.5, 1e4, 3e19, 1e30, torch.finfo(dtype).max])
    x = torch.cat([-far, torch.zeros(1), far]).to(dtype).requires_grad_()
    y = bias_gelu(x, approximate=approximate, impl=impl)
    exact = F.gelu(x.double(), approximate=approximate).to(dtype)
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=2e-6)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, 0.5 + 0.5 * x.sign(), rtol=0, atol=1e-6)
    assert bias_gelu(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_in_place_writes_the_same_values_into_x(instruction_set, impl):
    x, bias = torch.randn(5, 37), torch.randn(37)
    expected = F.gelu(x + bias)
    for values in (x.clone(), x.repeat_interleave(2, dim=1)[:, ::2]):
        out = bias_gelu(values, bias, inplace=True, impl=impl)
        assert out is values
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=2e-6)
    with pytest.raises(ValueError, match="inplace would overwrite the x that the gradient needs"):
        bias_gelu(x.requires_grad_(), bias, inplace=True)


@needs_cpp
def test_registration_passes_opcheck():
    x, bias = torch.randn(4, 24), torch.randn(24)
    torch.library.opcheck(torch.ops.fastenc.bias_gelu_.default, (x.clone(), bias, False))
    torch.library.opcheck(torch.ops.fastenc.bias_gelu_fwd.default, (x, bias, False))
    torch.library.opcheck(torch.ops.fastenc.bias_gelu_bwd.default, (x, x, bias, True))


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(lambda x, b: bias_gelu(x, b).sum())
    bias = torch.randn(40, requires_grad=True)
    for rows in (3, 7):
        x = torch.randn(rows, 40, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, bias), (x, bias))
        for a, b in zip(ours, torch.autograd.grad(F.gelu(x + bias).sum(), (x, bias)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_module_takes_the_place_of_torchs():
    x = torch.randn(3, 10)
    for approximate in ("none", "tanh"):
        torch.testing.assert_close(fnn.GELU(approximate)(x), torch.nn.GELU(approximate)(x))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', got 'fast'"):
        bias_gelu(torch.ones(2, 8), approximate="fast")
    with pytest.raises(ValueError, match="bias must have shape \\(8,\\)"):
        bias_gelu(torch.ones(2, 8), torch.ones(4))
