"""The products with epilogues of kernels/linear_gelu.py: on a GPU, or interpreted."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.ways.fused_sublayers import run_fused_sublayers
from fastenc.ops import linear_gelu
from fastenc.ops.linear_gelu import SWITCH
from fastenc.testing import assert_within_budget
from tests.helpers.layers import KINDS, Layer, exact_gradients, gradients, widened


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels of this file that are launched."""
    kernels = pytest.importorskip("fastenc.kernels.linear_gelu")
    started, run = [], kernels.run
    note = lambda kernel, *rest, **named: started.append(kernel) or run(kernel, *rest, **named)
    monkeypatch.setattr(kernels, "run", note)
    both = {kernels._linear_gelu_fwd_kernel: "forward", kernels._linear_gelu_bwd_kernel: "backward"}
    return lambda: [next(name for k, name in both.items() if k is each) for each in started]


def plain(x, up_weight, up_bias, down_weight):
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias)), down_weight)


def inputs_of(target, dtype, rows, width, inner, out):
    new = lambda *shape: torch.randn(*shape, device=target.device)
    weights = new(inner, width) / width**0.5, new(inner), new(out, inner) / inner**0.5
    return tuple(v.to(dtype).requires_grad_() for v in (new(*rows, width), *weights))


@pytest.mark.parametrize(
    "rows,width,inner,out", [((1,), 16, 8, 24), ((130,), 40, 200, 16), ((3, 43), 64, 136, 33)]
)
def test_values_and_gradients_keep_the_budget(triton_target, launches, rows, width, inner, out):
    for dtype in (dtype for dtype in triton_target.dtypes if dtype != torch.float32):
        inputs = inputs_of(triton_target, dtype, rows, width, inner, out)
        wide = [v.detach().double().requires_grad_() for v in inputs]
        y, theirs, exact = linear_gelu(*inputs, impl="triton"), plain(*inputs), plain(*wide)
        assert_within_budget(y, theirs, exact, f"{dtype} y")
        dy = torch.randn_like(y)
        ours = torch.autograd.grad(y, inputs, dy)
        plains = torch.autograd.grad(theirs, inputs, dy)
        truths = torch.autograd.grad(exact, wide, dy.double())
        names = ("dx", "dup_weight", "dup_bias", "ddown_weight")
        for name, *triple in zip(names, ours, plains, truths, strict=True):
            assert_within_budget(*triple, f"{dtype} {name}")
    assert set(launches()) == {"forward", "backward"}


def test_no_rows_and_strided_inputs(triton_target):
    dtype = triton_target.dtypes[-1]
    inputs = inputs_of(triton_target, dtype, (0,), 16, 8, 24)
    y = linear_gelu(*inputs, impl="triton")
    assert y.shape == (0, 24)
    assert all(g.eq(0).all() for g in torch.autograd.grad(y.sum(), inputs))
    inputs = inputs_of(triton_target, dtype, (5,), 16, 8, 24)
    strided = [torch.stack([v, v + 7], -1)[..., 0] for v in inputs]
    assert not strided[0].is_contiguous()
    actual, expected = (linear_gelu(*given, impl="triton") for given in (strided, inputs))
    assert torch.equal(actual, expected)


def test_only_what_is_asked_for_is_computed(triton_target, launches):
    inputs = inputs_of(triton_target, triton_target.dtypes[-1], (5,), 16, 8, 24)
    y = linear_gelu(*(v.detach() for v in inputs[:3]), inputs[3], impl="triton")
    (gradient,) = torch.autograd.grad(y.sum(), inputs[3:])
    assert gradient.shape == (24, 8) and launches() == ["forward"]


def test_auto_takes_the_kernels_only_with_the_switch(triton_target, launches, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    inputs = inputs_of(triton_target, triton_target.dtypes[-1], (5,), 16, 8, 24)
    linear_gelu(*inputs)
    assert not launches()
    monkeypatch.setenv(SWITCH, "1")
    linear_gelu(*inputs).sum().backward()
    assert launches() == ["forward", "backward"]


@pytest.fixture
def layer_dtype(triton_target):
    if triton_target.device.type == "cuda":
        pytest.skip("the layers' helper makes CPU tensors")
    return triton_target.dtypes[-1]


@pytest.mark.parametrize("variant", ["bert", "mbart"])
def test_an_encoder_layer_takes_them_with_the_switch(layer_dtype, launches, monkeypatch, variant):
    layer = Layer(KINDS[variant], (5, 0, 23), layer_dtype)
    monkeypatch.setenv(SWITCH, "1")
    results = layer.run(run_fused_sublayers)
    ours = gradients(results, layer.values)
    assert launches() == ["forward", "backward"]
    wide = widened(layer.values)
    plains, truths = layer.plain(), layer.plain(wide)
    for number, triple in enumerate(zip(results, plains, truths, strict=True)):
        assert_within_budget(*triple, f"result {number}")
    theirs = gradients(plains, layer.values)
    exact = exact_gradients(truths, wide, layer_dtype)
    for name in layer.values:
        # The key's weight sums the same terms as its bias, whose sum is zero.
        scale = float(exact["key"].abs().max()) if name == "key_bias" else 0.0
        assert_within_budget(ours[name], theirs[name], exact[name], f"d{name}", scale=scale)


def test_with_dropout_the_layer_is_that_of_separate_passes(layer_dtype, launches, monkeypatch):
    """But for rounding: GELU's input is rounded before it, and not with the product's epilogue."""
    layer, runs = Layer(KINDS["bert"], (5, 0, 23), layer_dtype), []
    for switch in ("0", "1"):
        monkeypatch.setenv(SWITCH, switch)
        (y,) = layer.run(run_fused_sublayers, LayerDropout(0.1, 0.1, 0.0, 0.1))
        runs.append({"y": y.detach(), **gradients((y,), layer.values)})
        assert bool(launches()) == (switch == "1")
    separate, ours = runs
    for name, expected in separate.items():
        scale = separate["key" if name == "key_bias" else name].abs().max().item()
        allowed = 16 * torch.finfo(layer_dtype).eps * scale
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=allowed)


def test_other_layers_keep_their_passes(layer_dtype, launches, monkeypatch):
    """A gate, another activation, no bias, or dropout of the inner activations."""
    monkeypatch.setenv(SWITCH, "1")
    for variant, p in (("tanh", 0.0), ("modernbert", 0.0), ("t5", 0.0), ("bert", 0.2)):
        layer = Layer(KINDS[variant], (5,), layer_dtype)
        gradients(layer.run(run_fused_sublayers, LayerDropout(0, 0, p, 0)), layer.values)
    assert not launches()
