"""The Triton kernels behind fastenc.ops.global_window_attention: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import global_window_attention
from fastenc.testing import assert_within_budget
from tests.helpers.global_window_attention import inputs_of, plain


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out))


def results(target, inputs, dout, **options):
    """The output and every gradient, on the CPU."""
    moved = inputs.to(inputs.qkv.dtype, target.device)
    out = global_window_attention(**moved.arguments(), impl=target.impl, **options)
    return [x.cpu() for x in (out, *gradients(out, moved, dout))]


@pytest.mark.parametrize("chosen", [None, []], ids=["many", "none"])
def test_values_and_gradients_keep_the_budget(triton_target, chosen):
    for dtype in triton_target.dtypes:
        lengths = (3, 0, 20)
        inputs = inputs_of(lengths, 1, 24, (6, 3), chosen, dtype=dtype)
        dout = torch.randn(sum(lengths), 1, 24)
        ours, exact = results(triton_target, inputs, dout), inputs.to(torch.float64)
        peers = [(out := plain(x), *gradients(out, x, dout)) for x in (inputs, exact)]
        for number, values in enumerate(zip(ours, *peers, strict=True)):
            assert_within_budget(*values, f"result {number}")


def test_deterministic_gradients_with_the_references_dropout(triton_target):
    inputs, dout = inputs_of((5, 20), 1, 16), torch.randn(25, 1, 16)
    options = {"dropout_p": 0.3, "softmax_scale": 0.2}
    state = torch.tensor([5, 6])
    on_device = {**options, "rng_state": state.to(triton_target.device)}
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (results(triton_target, inputs, dout, **on_device) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    out = global_window_attention(
        **inputs.arguments(), **options, rng_state=state, impl="reference"
    )
    expected = (out, *gradients(out, inputs, dout))
    for ours, same, theirs in zip(first, again, expected, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
