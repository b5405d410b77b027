"""Inputs, gradients and torch's own norms."""

import torch
import torch.nn.functional as F

from fastenc.ops import layer_norm, rms_norm
from fastenc.testing import assert_within_budget

NAMES = ("x", "residual", "x_bias", "weight", "bias")


def inputs(rows, width, dtype):
    make = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()
    return {
        "x": make(rows, width),
        "residual": make(rows, width),
        "x_bias": make(width),
        "weight": make(width),
        "bias": make(width),
    }


def wide(values):
    return {name: v.detach().double().requires_grad_() for name, v in values.items()}


def plain(x, residual, x_bias, weight, bias):
    return F.layer_norm(residual + (x + x_bias), x.shape[-1:], weight, bias, 1e-5)


def gradients(y, values, dy):
    return dict(zip(values, torch.autograd.grad(y, list(values.values()), dy), strict=True))


def check_residual_sum(op, impl, device, dtype, rows, width):
    """The norm and h = residual + x + x_bias, both of them with a gradient, against plain PyTorch and float64."""
    names = NAMES if op is layer_norm else NAMES[:4]
    drawn = inputs(rows, width, dtype)
    values = {name: drawn[name].detach().to(device).requires_grad_() for name in names}
    truth_in = wide(values)
    dy, dh = torch.randn(2, rows, width, device=device).to(dtype)

    def plain_results(x, residual, x_bias, weight, bias=None):
        h = residual + (x + x_bias)
        if op is rms_norm:
            return F.rms_norm(h, (width,), weight, 1e-6), h
        return F.layer_norm(h, (width,), weight, bias, 1e-5), h

    def with_gradients(results, leaves):
        upstream = [g.to(results[0].dtype) for g in (dy, dh)]
        return (*results, *torch.autograd.grad(results, list(leaves.values()), upstream))

    ours = with_gradients(op(**values, return_residual_sum=True, impl=impl), values)
    theirs = with_gradients(plain_results(**values), values)
    truth = with_gradients(plain_results(**truth_in), truth_in)
    for what, *three in zip(("y", "h", *names), ours, theirs, truth, strict=True):
        assert_within_budget(*three, f"{dtype} {what}")
