"""The Triton kernels behind fastenc.ops.layer_norm and rms_norm: on a GPU, or interpreted."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import layer_norm, rms_norm
from fastenc.reference import layer_norm as reference
from fastenc.testing import assert_within_budget
from tests.helpers.layer_norm import (
    NAMES,
    check_dropout_next_to_1,
    check_offset_rows,
    check_residual_sum,
    gradients,
    inputs,
    plain,
    wide,
)


def on(device, values):
    return {name: v.detach().to(device).requires_grad_() for name, v in values.items()}


# 768 columns are three pieces of 256, 1,000 are one masked piece. With 40 rows, a persistent program makes more than
# one turn.
@pytest.mark.parametrize("rows,width", [(1, 128), (3, 37), (40, 768), (17, 1000), (2, 8192)])
def test_layer_norm_and_every_gradient_keep_the_budget(triton_target, rows, width):
    for dtype in triton_target.dtypes:
        values = on(triton_target.device, inputs(rows, width, dtype))
        dy = torch.randn(rows, width, device=triton_target.device).to(dtype)
        truth_in = wide(values)
        y = layer_norm(**values, impl=triton_target.impl)
        y_plain, y_truth = plain(**values), reference.layer_norm(**truth_in)
        assert_within_budget(y, y_plain, y_truth, f"{dtype} y")
        ours, theirs, truth = (
            gradients(y, values, dy),
            gradients(y_plain, values, dy),
            gradients(y_truth, truth_in, dy.double()),
        )
        for name in NAMES:
            assert_within_budget(ours[name], theirs[name], truth[name], f"{dtype} d{name}")


@pytest.mark.parametrize("width", [768, 1000])
def test_rows_with_a_large_mean_keep_the_budget(triton_target, width):
    check_offset_rows(triton_target.impl, triton_target.device, width)


def test_rms_norm_and_a_norm_without_parameters_keep_the_budget(triton_target):
    device, impl = triton_target.device, triton_target.impl
    values = inputs(33, 200, torch.float32)
    values = on(device, {name: values[name] for name in ("x", "weight")})
    dy = torch.randn(33, 200, device=device)
    truth_in = wide(values)
    y, y_truth = rms_norm(**values, impl=impl), reference.rms_norm(**truth_in)
    y_plain = F.rms_norm(values["x"], (200,), values["weight"], 1e-6)
    assert_within_budget(y, y_plain, y_truth, "y")
    ours, theirs = gradients(y, values, dy), gradients(y_plain, values, dy)
    truth = gradients(y_truth, truth_in, dy.double())
    for name in values:
        assert_within_budget(ours[name], theirs[name], truth[name], f"d{name}")
    x = values["x"].detach()
    torch.testing.assert_close(
        layer_norm(x, impl=impl), F.layer_norm(x, (200,)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_the_residual_sum_and_its_gradient_keep_the_budget(triton_target, op):
    for dtype in triton_target.dtypes:
        check_residual_sum(op, triton_target.impl, triton_target.device, dtype, 17, 200)


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_dropout_mask_and_gradients_are_the_references(triton_target, op):
    device = triton_target.device
    x, residual = (torch.randn(20, 300, device=device, requires_grad=True) for _ in range(2))
    x_bias = torch.randn(300, device=device, requires_grad=True)
    dy, dh = torch.randn(2, 20, 300, device=device)
    leaves = (x, residual, x_bias)
    results = []
    for impl in (triton_target.impl, "reference"):
        options = {"residual": residual, "x_bias": x_bias, "dropout_p": 0.3, "impl": impl}
        torch.manual_seed(5)
        y = op(x, **options)
        torch.manual_seed(5)
        both = op(x, **options, return_residual_sum=True)
        alone = torch.autograd.grad(y, leaves, dy)
        results.append((y, *alone, *both, *torch.autograd.grad(both, leaves, (dy, dh))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_row_and_no_rows_are_fine(triton_target):
    device, impl = triton_target.device, triton_target.impl
    x = torch.randn(5, 96, device=device)
    x[2, 7] = float("nan")
    y = layer_norm(x, impl=impl)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()
    x = torch.zeros(0, 96, device=device, requires_grad=True)
    weight = torch.ones(96, device=device, requires_grad=True)
    layer_norm(x, weight, impl=impl).sum().backward()
    assert x.grad.shape == (0, 96) and weight.grad.eq(0).all()


def test_a_probability_next_to_1_keeps_one_element_in_65536(triton_target):
    check_dropout_next_to_1(1 - 2**-17, triton_target.device)
