"""The Triton kernels behind fastenc.ops.block_sparse_attention: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import block_sparse_attention
from fastenc.testing import assert_within_budget
from tests.helpers.block_sparse_attention import inputs_of, plain


def results(target, inputs, dout):
    """The output and the gradient, on the CPU."""
    moved = inputs.to(inputs.qkv.dtype, target.device)
    out = block_sparse_attention(**moved.arguments(), impl=target.impl)
    return [x.cpu() for x in (out, *torch.autograd.grad(out, moved.qkv, dout.to(out)))]


# Blocks of several tiles, and of one that they do not fill.
@pytest.mark.parametrize(("block_size", "plans"), [(32, 1), (10, 2)])
def test_values_and_gradients_keep_the_budget(triton_target, block_size, plans):
    for dtype in triton_target.dtypes:
        inputs = inputs_of((3, 0, 45), 2, 24, block_size, plans, dtype)
        dout = torch.randn(48, 2, 24)
        ours, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
        peers = [
            (out := plain(x), *torch.autograd.grad(out, x.qkv, dout.to(out)))
            for x in (inputs, exact)
        ]
        for number, values in enumerate(zip(ours, *peers, strict=True)):
            assert_within_budget(*values, f"result {number}")


def test_equal_scores_of_any_size_have_equal_probabilities(triton_target):
    """Their log-sum-exp is rounded by more than the logarithm of the sum: probabilities need that by itself."""
    inputs, dout = inputs_of((3, 40), 2, 16, 16), torch.randn(43, 2, 16)
    with torch.no_grad():
        inputs.qkv[:, :2].zero_()
        inputs.qkv[:, :2, :, 0] = 2.0**13
    ours, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
    peers = [
        (out := plain(x), *torch.autograd.grad(out, x.qkv, dout.to(out))) for x in (inputs, exact)
    ]
    for number, values in enumerate(zip(ours, *peers, strict=True)):
        assert_within_budget(*values, f"result {number}")


def test_no_tokens_have_no_results(triton_target):
    for lengths in ((), (0, 0)):
        inputs = inputs_of(lengths, 2, 16, 16)
        out, dqkv = results(triton_target, inputs, torch.zeros(0, 2, 16))
        assert out.shape == (0, 2, 16) and dqkv.shape == (0, 3, 2, 16)
