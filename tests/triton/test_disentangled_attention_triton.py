"""The Triton kernels behind fastenc.ops.disentangled_attention: on a GPU, or interpreted."""

import pytest
import torch
from fastenc.kernels import disentangled_attention_workspace

from fastenc.ops import disentangled_attention
from fastenc.testing import assert_within_budget
from tests.helpers.disentangled_attention import TERMS, inputs_of, plain


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out))


def results(target, inputs, dout, **options):
    """The output and every gradient, on the CPU."""
    moved = inputs.to(inputs.qkv.dtype, target.device)
    out = disentangled_attention(**moved.arguments(), impl=target.impl, **options)
    return [x.cpu() for x in (out, *gradients(out, moved, dout))]


@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_keep_the_budget(triton_target, terms):
    for dtype in triton_target.dtypes:
        lengths = (3, 0, 40, 17)
        inputs = inputs_of(lengths, 2, 24, terms, buckets=8, farthest=30, dtype=dtype)
        dout = torch.randn(sum(lengths), 2, 24)
        actual, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
        peers = [(out := plain(x), *gradients(out, x, dout)) for x in (inputs, exact)]
        for number, values in enumerate(zip(actual, *peers, strict=True)):
            assert_within_budget(*values, f"result {number}")


def test_sequences_of_several_blocks_one_head_at_a_time(triton_target, monkeypatch):
    monkeypatch.setattr(disentangled_attention_workspace, "WORKSPACE", 1)
    lengths = (130, 64, 1, 65)
    inputs = inputs_of(lengths, 2, 16, buckets=16, farthest=100)
    half, dout = inputs.to(torch.float16), torch.randn(sum(lengths), 2, 16)
    actual = results(triton_target, half, dout, softmax_scale=0.2)
    exact = half.to(torch.float64)
    out = disentangled_attention(**exact.arguments(), softmax_scale=0.2, impl="reference")
    for ours, theirs in zip(actual, (out, *gradients(out, exact, dout)), strict=True):
        error = torch.linalg.vector_norm(ours.double() - theirs) / torch.linalg.vector_norm(theirs)
        assert error < 1.5e-3


def test_dropout_and_its_gradients_are_the_references(triton_target):
    inputs, dout = inputs_of((5, 40, 17), 2, 16), torch.randn(62, 2, 16)
    options = {"dropout_p": 0.3, "softmax_scale": 0.2}
    state = torch.tensor([5, 6])
    actual = results(
        triton_target, inputs, dout, **options, rng_state=state.to(triton_target.device)
    )
    out = disentangled_attention(**inputs.arguments(), **options, rng_state=state, impl="reference")
    for ours, theirs in zip(actual, (out, *gradients(out, inputs, dout)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_equal_scores_of_any_size_have_equal_probabilities(triton_target):
    """Their log-sum-exp is rounded by more than the logarithm of the sum: probabilities need that by itself."""
    inputs, dout = inputs_of((3, 40), 2, 32, "c2p"), torch.randn(43, 2, 32)
    with torch.no_grad():
        inputs.qkv[:, :2].zero_()
        inputs.qkv[:, :2, :, 0] = 2.0**13
        inputs.keys.zero_()
    actual, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
    peers = [(out := plain(x), *gradients(out, x, dout)) for x in (inputs, exact)]
    for number, values in enumerate(zip(actual, *peers, strict=True)):
        assert_within_budget(*values, f"result {number}")


def test_no_tokens_have_no_results(triton_target):
    for lengths in ((), (0, 0)):
        inputs = inputs_of(lengths, 2, 16)
        out, dqkv, *dtables = results(triton_target, inputs, torch.zeros(0, 2, 16))
        assert out.shape == (0, 2, 16) and dqkv.shape == (0, 3, 2, 16)
        assert not any(gradient.any() for gradient in dtables)
