"""A layer's third sublayer, which vectors of the layer gate, beside torch's own functions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fastenc.nn.layer_vectors import LayerVectorTable, layer_vectors
from fastenc.nn.ways.cpu_weights import weights_reason
from fastenc.testing import assert_within_budget
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import (
    EPS,
    KINDS,
    WIDTH,
    Layer,
    exact_gradients,
    gradients,
    layer_variant,
    widened,
)

KIND = KINDS["embedding gemma2"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
def test_values_and_every_gradient_keep_the_budget(dtype):
    layer = Layer(KIND, dtype=dtype)
    wide = widened(layer.values)
    results, plain, truth = layer.run(), layer.plain(), layer.plain(wide)
    for ours, theirs, exact in zip(results, plain, truth, strict=True):
        assert_within_budget(ours, theirs, exact, "y")
    ours, theirs = gradients(results, layer.values), gradients(plain, layer.values)
    exact = exact_gradients(truth, wide, dtype)
    for name in layer.values:
        assert_within_budget(ours[name], theirs[name], exact[name], f"d{name}")


@DTYPES
def test_the_vectors_of_a_layer(dtype):
    """The division by the root of the width is in the eps of the norm; a small x shows the eps."""
    torch.manual_seed(0)
    size, number = KIND.spec.layer_vector_size, 2
    x = 1e-3 * torch.randn(7, WIDTH)
    table = torch.randn(3 * size, WIDTH), 1 + 0.3 * torch.randn(size)

    def plain(x, projection, norm):
        rows = projection[number * size : (number + 1) * size]
        return F.rms_norm(F.linear(x, rows) * WIDTH**-0.5, (size,), norm, EPS)

    given = [each.to(dtype) for each in (x, *table)]
    ours = layer_vectors(given[0], LayerVectorTable(*given[1:]), number, KIND.spec)
    assert_within_budget(ours, plain(*given), plain(*(each.double() for each in given)), "e")


@pytest.mark.parametrize(
    "changes",
    [dict(pre_norm=False), dict(own_norms=False), dict(norm="layer")],
    ids=["post-norm", "without own norms", "LayerNorm"],
)
def test_other_ends_of_the_sublayer_are_refused(changes):
    described = dict(pre_norm=True, own_norms=True, norm="rms", vector_size=16) | changes
    with pytest.raises(ValueError, match="must have pre_norm, own_norms and RMSNorm"):
        layer_variant(**described)


@needs_cpp
def test_packed_weights_need_vectors_of_16_numbers():
    odd = replace(KIND.spec, layer_vector_size=24)
    reason = weights_reason(Layer(KIND).weights(), odd)
    assert reason == "layer vectors must have a multiple of 16 numbers, they have 24"
