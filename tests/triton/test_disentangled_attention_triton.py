"""The Triton kernels behind fastenc.ops.disentangled_attention: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import disentangled_attention
from fastenc.testing import assert_within_budget
from tests.helpers.disentangled_attention import TERMS, inputs_of, plain


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out))


def results(target, inputs, dout, **options):
    """The output and every gradient, on the CPU."""
    moved = inputs.to(inputs.qkv.dtype, target.device)
    out = disentangled_attention(**moved.call(), impl=target.impl, **options)
    return [x.cpu() for x in (out, *gradients(out, moved, dout))]


@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_keep_the_budget(triton_target, terms):
    for dtype in triton_target.dtypes:
        lengths = (5, 0, 70, 33)
        inputs = inputs_of(lengths, 2, 24, terms, buckets=8, farthest=30, dtype=dtype)
        dout = torch.randn(sum(lengths), 2, 24)
        found, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
        peers = [(out := plain(x), *gradients(out, x, dout)) for x in (inputs, exact)]
        for number, values in enumerate(zip(found, *peers, strict=True)):
            assert_within_budget(*values, f"result {number}")
