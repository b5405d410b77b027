import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import linear_gelu
from fastenc.ops.linear_gelu import SWITCH
from fastenc.reference import linear_gelu as reference
from fastenc.testing import assert_within_budget
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp

NAMES = ("x", "up_weight", "up_bias", "down_weight")


def inputs_of(*rows, width=24, inner=40, out=16, dtype=torch.float32):
    new = lambda *shape: torch.randn(*shape).div(shape[-1] ** 0.5).to(dtype).requires_grad_()
    x = torch.randn(*rows, width).to(dtype).requires_grad_()
    return x, new(inner, width), new(inner), new(out, inner)


def plain(x, up_weight, up_bias, down_weight):
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias)), down_weight)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 65), (0,), ()])
def test_values_and_gradients_keep_the_budget(rows, dtype, impl):
    inputs = inputs_of(*rows, dtype=dtype)
    wide = [value.detach().double().requires_grad_() for value in inputs]
    y, theirs, exact = linear_gelu(*inputs, impl=impl), plain(*inputs), plain(*wide)
    assert y.shape == (*rows, 16) and y.dtype == dtype
    assert_within_budget(y, theirs, exact, "y")
    dy = torch.randn_like(y)
    triples = zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(theirs, inputs, dy),
        torch.autograd.grad(exact, wide, dy.double()),
        strict=True,
    )
    for name, triple in zip(NAMES, triples, strict=True):
        assert_within_budget(*triple, f"d{name}")


def test_the_reference_computes_in_float64_if_asked():
    wide = [value.double() for value in inputs_of(5)]
    torch.testing.assert_close(reference.linear_gelu(*wide), plain(*wide), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_autocast_casts_every_input(impl):
    inputs = inputs_of(6)
    with torch.autocast("cpu", torch.bfloat16):
        y, theirs = linear_gelu(*inputs, impl=impl), plain(*inputs)
    assert y.dtype == theirs.dtype == torch.bfloat16
    assert_within_budget(y, theirs, plain(*(v.bfloat16().double() for v in inputs)), "y")
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.sum(), inputs))


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(linear_gelu)
    for rows in (3, 7):
        inputs = inputs_of(rows)
        actual, expected = compiled(*inputs), plain(*inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        ours, theirs = (torch.autograd.grad(y.sum(), inputs) for y in (actual, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_switch_gives_a_cpu_no_kernel(monkeypatch):
    inputs = inputs_of(3)
    expected = linear_gelu(*inputs)
    monkeypatch.setenv(SWITCH, "1")
    assert torch.equal(linear_gelu(*inputs), expected)
    with pytest.raises(
        ValueError, match=r"it runs on CUDA tensors, got one on cpu|triton is not installed"
    ):
        linear_gelu(*inputs, impl="triton")


def test_bad_input_is_named():
    x, up, bias, down = inputs_of(3)
    with pytest.raises(
        ValueError, match=r"up_weight must have shape \(inner, 24\), got \(40, 23\)"
    ):
        linear_gelu(x, up[:, 1:], bias, down)
    with pytest.raises(ValueError, match=r"up_bias must have shape \(40,\), got \(39,\)"):
        linear_gelu(x, up, bias[1:], down)
    with pytest.raises(ValueError, match=r"down_weight must have shape \(out_features, 40\)"):
        linear_gelu(x, up, bias, down.t())
    with pytest.raises(ValueError, match=r"up_bias must have x's dtype torch\.float32"):
        linear_gelu(x, up, bias.bfloat16(), down)
    with pytest.raises(ValueError, match="impl must be one of"):
        linear_gelu(x, up, bias, down, impl="fast")
