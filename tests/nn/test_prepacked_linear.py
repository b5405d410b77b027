"""The inference layers' products: reordered weights follow the weights."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.nn.prepacked_linear import PrepackedLinear

pytestmark = pytest.mark.usefixtures("ours")


def weights_and_biases(dtype=torch.float32):
    both = [torch.randn(16, 24).to(dtype) for _ in range(3)], [torch.randn(16).to(dtype)] * 3
    return both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_values_are_those_of_the_stacked_layers(dtype, rows):
    weights, biases = weights_and_biases(dtype)
    x = torch.randn(rows, 24).to(dtype)
    expected = F.linear(x, torch.cat(weights), torch.cat(biases))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(PrepackedLinear()(x, weights, biases), expected, **tolerance)


def test_changed_weights_are_noticed_behind_the_version_counter():
    weights, biases = weights_and_biases()
    layer, x = PrepackedLinear(), torch.randn(5, 24)
    layer(x, weights, biases)
    weights[1].data.mul_(2)
    expected = F.linear(x, torch.cat(weights), torch.cat(biases))
    torch.testing.assert_close(layer(x, weights, biases), expected, rtol=1e-5, atol=1e-5)
