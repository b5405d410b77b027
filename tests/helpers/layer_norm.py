"""Inputs, gradients and torch's own norms."""

import torch
import torch.nn.functional as F

from fastenc.ops import layer_norm, rms_norm
from fastenc.reference.dropout import dropout_scales, hash_columns, row_keys
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
    """The norm and h = residual + x + x_bias, both with a gradient, against plain PyTorch and float64."""
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


def check_offset_rows(impl, device, width):
    """Rows of equal values, and rows with a mean far above their deviations, against plain PyTorch and float64.

    Rows of equal values must give 0. With the rounding error of the sum in the mean, they give up to 0.43 at this eps.
    """
    eps = 1e-12
    constant = torch.tensor([1.0, 0.1, -37.3, 1e-4, 12345.678, 3e8]).to(device)
    same = constant[:, None].repeat(1, width)
    with torch.no_grad():
        assert not layer_norm(same, eps=eps, impl=impl).any()
    offsets = torch.tensor([30.0, -1e3, 1e5, 7e6], device=device)
    x = (offsets[:, None] + torch.randn(4, width, device=device)).requires_grad_()
    weight = torch.randn(width, device=device)
    dy = torch.randn(4, width, device=device)
    exact_x = x.detach().double().requires_grad_()
    three = []
    for y, leaf in (
        (layer_norm(x, weight, eps=eps, impl=impl), x),
        (F.layer_norm(x, (width,), weight, None, eps), x),
        (F.layer_norm(exact_x, (width,), weight.double(), None, eps), exact_x),
    ):
        three.append((y, torch.autograd.grad(y, leaf, dy.to(y.dtype))[0]))
    for what, *results in zip(("y", "dx"), *three, strict=True):
        for offset, *row in zip(offsets.tolist(), *results, strict=True):
            assert_within_budget(*row, f"{what} around {offset:g}")


def check_dropout_next_to_1(dropout_p, device):
    """One element in 65,536 is kept, by the mask's definition and by the reference."""
    x, rng_state = torch.ones(128, 1024, device=device), torch.tensor([3, 4], device=device)
    rows, columns = (torch.arange(n, device=device) for n in x.shape)
    h = layer_norm(
        x, residual=x * 0, dropout_p=dropout_p, rng_state=rng_state, return_residual_sum=True
    )[1]
    kept = hash_columns(row_keys(rng_state, 0, rows), columns) >> 16 == 65535
    assert kept.any()
    assert torch.equal(h, kept * 65536.0)
    assert torch.equal(h, dropout_scales(rng_state, 0, rows, len(columns), dropout_p))
