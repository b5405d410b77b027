import pytest
import torch
import torch.nn.functional as F

from fastenc import nn as fnn
from fastenc.ops import layer_norm, rms_norm
from fastenc.reference import layer_norm as reference
from fastenc.testing import assert_within_budget
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.layer_norm import (
    NAMES,
    check_offset_rows,
    check_residual_sum,
    gradients,
    inputs,
    plain,
    wide,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows,width", [(1, 1), (3, 37), (65, 384), (130, 768), (5, 1025)])
def test_layer_norm_and_every_gradient_keep_the_budget(instruction_set, rows, width, dtype):
    values = inputs(rows, width, dtype)
    dy = torch.randn(rows, width).to(dtype)
    truth_in = wide(values)
    y = layer_norm(**values, impl="cpp")
    y_plain = plain(**values)
    y_truth = reference.layer_norm(**truth_in)
    assert_within_budget(y, y_plain, y_truth, "y")
    ours, theirs, truth = (
        gradients(y, values, dy),
        gradients(y_plain, values, dy),
        gradients(y_truth, truth_in, dy.double()),
    )
    for name in NAMES:
        if width == 1 and name in ("x", "residual", "x_bias", "weight"):
            continue  # it is 0 in exact arithmetic, so the budget has no scale
        assert_within_budget(ours[name], theirs[name], truth[name], f"d{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rms_norm_keeps_the_budget(instruction_set, dtype):
    values = {name: v for name, v in inputs(33, 200, dtype).items() if name in ("x", "weight")}
    truth_in = wide(values)
    dy = torch.randn(33, 200).to(dtype)
    y = rms_norm(**values, impl="cpp")
    y_plain = F.rms_norm(values["x"], (200,), values["weight"], 1e-6)
    y_truth = reference.rms_norm(**truth_in)
    assert_within_budget(y, y_plain, y_truth, "y")
    ours, theirs = gradients(y, values, dy), gradients(y_plain, values, dy)
    truth = gradients(y_truth, truth_in, dy.double())
    for name in values:
        assert_within_budget(ours[name], theirs[name], truth[name], f"d{name}")


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_dropout_mask_and_gradients_are_the_references(instruction_set, op):
    x = torch.randn(40, 300, requires_grad=True)
    residual = torch.randn(40, 300, requires_grad=True)
    dy, dh = torch.randn(2, 40, 300)
    results = []
    for impl in ("cpp", "reference"):
        torch.manual_seed(5)
        y = op(x, residual=residual, dropout_p=0.3, impl=impl)
        torch.manual_seed(5)
        both = op(x, residual=residual, dropout_p=0.3, return_residual_sum=True, impl=impl)
        alone = torch.autograd.grad(y, (x, residual), dy)
        results.append((y, *alone, *both, *torch.autograd.grad(both, (x, residual), (dy, dh))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [37, 768, 1000])
def test_rows_with_a_large_mean_keep_the_budget(instruction_set, width):
    check_offset_rows("cpp", "cpu", width)


@pytest.mark.parametrize("width", [37, 768])
def test_the_reference_of_rows_with_a_large_mean_keeps_the_budget(width):
    check_offset_rows("reference", "cpu", width)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_a_variance_that_overflows_gives_zeros(instruction_set, impl):
    assert not layer_norm(1e30 * torch.randn(3, 768), impl=impl).any()


def test_dropout_has_the_asked_rate_and_mean():
    from fastenc.reference.dropout import dropout_scales

    scales = dropout_scales(torch.tensor([12345, 6]), 0, torch.arange(2000), 500, 0.1)
    assert abs((scales == 0).double().mean().item() - 0.1) < 4 * (0.1 * 0.9 / 1e6) ** 0.5 + 2**-16
    assert abs(scales.double().mean().item() - 1) < 2e-3
    # Neighbouring rows and columns are independent: the joint rate is the product of the rates.
    zero = (scales == 0).double()
    assert abs((zero[1:] * zero[:-1]).mean().item() - 0.01) < 1e-3
    assert abs((zero[:, 1:] * zero[:, :-1]).mean().item() - 0.01) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_the_residual_sum_and_its_gradient_keep_the_budget(instruction_set, op, dtype):
    check_residual_sum(op, "cpp", "cpu", dtype, 33, 200)


@pytest.mark.parametrize("given", [(), ("x_bias",), ("residual",)], ids=str)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_residual_sum_of_what_is_given(impl, given):
    values = {name: torch.randn(5, 8) if name != "x_bias" else torch.randn(8) for name in NAMES[:3]}
    values = {name: values[name].requires_grad_() for name in ("x", *given)}
    with torch.no_grad():
        y, h = layer_norm(**values, return_residual_sum=True, impl=impl)
    torch.testing.assert_close(h, sum(values.values()))
    assert torch.equal(y, layer_norm(**values, impl=impl))
    # The loss reads only one of the results.
    y, h = layer_norm(**values, return_residual_sum=True, impl=impl)
    dh = torch.randn_like(h)
    for name, gradient in gradients(h, values, dh).items():
        torch.testing.assert_close(gradient, dh.sum(0) if name == "x_bias" else dh)
    y, _ = layer_norm(**values, return_residual_sum=True, impl=impl)
    alone = gradients(layer_norm(**values, impl=impl), values, dh)
    for name, gradient in gradients(y, values, dh).items():
        torch.testing.assert_close(gradient, alone[name])


@needs_cpp
def test_result_does_not_depend_on_the_number_of_threads():
    values = inputs(500, 129, torch.float32)
    dy = torch.randn(500, 129)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        y = layer_norm(**values, dropout_p=0.1)
        results.append([y, *gradients(y, values, dy).values()])
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@needs_cpp
def test_registration_passes_opcheck():
    x, w, rng_state = torch.randn(4, 24), torch.randn(24), torch.tensor([3, 4])
    torch.library.opcheck(
        torch.ops.fastenc.layer_norm_fwd.default, (x, x, w, w, w, rng_state, 0.1, 1e-5, False, True)
    )
    torch.library.opcheck(
        torch.ops.fastenc.layer_norm_fwd.default,
        (x, None, None, w, w, None, 0.0, 1e-5, True, False),
    )
    statistics = torch.randn(4)
    for dresidual_sum in (None, x):
        torch.library.opcheck(
            torch.ops.fastenc.layer_norm_bwd.default,
            (x, dresidual_sum, x, statistics, statistics, w, rng_state, 0.1, False, True, True),
        )


@needs_cpp
@pytest.mark.parametrize("fused", [False, True])
def test_torch_compile_full_graph_and_dynamic_shapes(fused):
    def loss(x, w):
        y, h = layer_norm(x, w, residual=2 * x if fused else None, return_residual_sum=True)
        return (y * h).sum()

    compiled = compiled_once(loss)
    w = torch.randn(40, requires_grad=True)
    for rows in (3, 7):
        x = torch.randn(rows, 40, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, w), (x, w))
        theirs = torch.autograd.grad(loss(x, w), (x, w))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_rows_and_strided_input(instruction_set):
    w = torch.randn(16, requires_grad=True)
    y = layer_norm(torch.empty(0, 16, requires_grad=True), w)
    y.sum().backward()
    assert y.shape == (0, 16) and torch.equal(w.grad, torch.zeros(16))
    x = torch.randn(16, 9).t()
    torch.testing.assert_close(layer_norm(x), F.layer_norm(x, (16,)))
    torch.testing.assert_close(
        layer_norm(x.reshape(3, 3, 16)), F.layer_norm(x.reshape(3, 3, 16), (16,))
    )


def test_inputs_are_not_changed_and_nan_stays_in_its_row():
    x = torch.randn(4, 20)
    x[2, 3] = float("nan")
    before = x.clone()
    y = layer_norm(x, residual=x)
    assert torch.equal(x.nan_to_num(9), before.nan_to_num(9))
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


def test_modules_take_the_place_of_torchs():
    x = torch.randn(5, 24)
    for ours, theirs in (
        (fnn.LayerNorm(24, eps=1e-6), torch.nn.LayerNorm(24, eps=1e-6)),
        (fnn.RMSNorm(24), torch.nn.RMSNorm(24)),
        (
            fnn.LayerNorm(24, elementwise_affine=False),
            torch.nn.LayerNorm(24, elementwise_affine=False),
        ),
    ):
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))
    module = fnn.LayerNorm(24).eval()
    torch.testing.assert_close(module(x, residual=x, dropout_p=0.5), module(2 * x))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"weight": torch.ones(5)}, "weight must have shape \\(8,\\).*got \\(5,\\)"),
        ({"residual": torch.ones(3, 8)}, "residual must have x's shape \\(2, 8\\), got \\(3, 8\\)"),
        (
            {"residual": torch.ones(2, 8).half()},
            "residual must have x's dtype torch.float32, got torch.float16",
        ),
        ({"dropout_p": 1.0}, "dropout_p must be in \\[0, 1\\), got 1.0"),
        ({"impl": "fastest"}, "impl must be one of .* got 'fastest'"),
        (
            {"weight": torch.ones(8, device="meta")},
            "weight must be on the input's device cpu, got meta",
        ),
        ({"x": torch.ones(2, 8).long()}, "must be a floating-point tensor"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(**{"x": torch.ones(2, 8), **arguments})


def test_an_explicit_request_never_falls_back():
    with pytest.raises(ValueError, match="impl='cpp' cannot take this call"):
        layer_norm(torch.ones(2, 8).double(), impl="cpp")
    with pytest.raises(ValueError, match="one dimension"):
        fnn.LayerNorm((4, 8))


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_weights_of_another_dtype(dtype):
    x, weight, bias = torch.randn(4, 16), torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    ours, theirs = (layer_norm(x, weight, bias, impl=impl) for impl in ("cpp", "reference"))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_eps_is_a_number_of_at_least_zero(eps):
    with pytest.raises(ValueError, match="layer_norm: eps must be a finite number of at least 0"):
        layer_norm(torch.ones(2, 8), eps=eps)
