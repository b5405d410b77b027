"""A layer without gradients, as two ops over blocks of rows and as single ones, beside torch's own functions."""

import pytest
import torch

from fastenc.nn.inference_layer import InferenceLayer
from fastenc.ops import _encoder_layer
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import inputs, options, plain_layer, weights_of

pytestmark = needs_cpp


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# 40 is no multiple of 16; 336 more than the kernel keeps at a time, and no whole number of panels.
@pytest.mark.parametrize(
    ("activation", "inner"), [("gelu", 40), ("gelu", 96), ("gelu", 336), ("gelu_new", 336)]
)
@pytest.mark.parametrize(
    "lengths", [EDGE_LENGTHS, (1,), (0,), (130, 7, 250), (3,) * 150, (0, 90, 0, 0, 40, 1, 0)]
)
def test_values(lengths, activation, inner, ours, instruction_set, threads):
    values, offsets, longest = inputs(lengths, inner=inner)
    wide = {name: value.double() for name, value in values.items()}
    approximate = "tanh" if activation == "gelu_new" else "none"
    with torch.no_grad():
        y = InferenceLayer()(
            values["x"], offsets, longest, weights_of(values), options(activation=activation)
        )
        plain, truth = (plain_layer(v, lengths, approximate) for v in (values, wide))
    assert_within_budget(y, plain, truth)


@pytest.mark.parametrize(
    ("activation", "inner", "lengths", "expected"),
    [
        ("gelu", 96, (20,) * 20, {"attention", "after_attention"}),
        ("gelu_new", 96, (20,) * 20, {"attention", "after_attention"}),
        ("relu", 96, (20,) * 20, {"attention"}),
        ("gelu", 40, (20,) * 20, {"attention"}),
        ("gelu", 96, (400,), {"after_attention"}),  # a thread would wait for the other
        ("gelu", 96, (2,) * 10, set()),  # few rows: products share out the weights
    ],
)
def test_what_blocks_of_rows_take(activation, inner, lengths, expected, ours, monkeypatch):
    taken = set()
    for name in ("attention", "after_attention"):
        real = getattr(_encoder_layer, name)
        monkeypatch.setattr(_encoder_layer, name, lambda *a, n=name, f=real: taken.add(n) or f(*a))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    values, offsets, longest = inputs(lengths, inner=inner)
    with torch.no_grad():
        InferenceLayer()(
            values["x"], offsets, longest, weights_of(values), options(activation=activation)
        )
    assert taken == (expected if ours else set())


def test_rows_do_not_depend_on_those_beside_them(ours):
    if not ours:
        pytest.skip("torch's products choose their order of sums by the number of rows")
    values, offsets, longest = inputs((130, 7, 250))
    layer, weights = InferenceLayer(), weights_of(values)
    with torch.no_grad():
        whole = layer(values["x"], offsets, longest, weights, options())
        alone = layer(values["x"][130:137], offsets[:2].new_tensor([0, 7]), 7, weights, options())
    assert torch.equal(whole[130:137], alone)


def test_changed_weights_are_noticed(ours):
    values, offsets, longest = inputs()
    layer = InferenceLayer()
    with torch.no_grad():
        layer(values["x"], offsets, longest, weights_of(values), options())
        for name in ("value", "attention_out", "up", "down"):
            values[name].data.mul_(2)  # behind the version counter
        y = layer(values["x"], offsets, longest, weights_of(values), options())
        expected = plain_layer(values, EDGE_LENGTHS)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_reordered_once_whatever_the_number_of_rows(ours):
    values, offsets, longest = inputs((20,) * 20)
    layer, weights = InferenceLayer(), weights_of(values)
    copies = []
    with torch.no_grad():
        for count in (20, 1, 20):  # blocks of rows, single products, blocks of rows
            rows = values["x"][: 20 * count]
            layer(rows, offsets[: count + 1], longest, weights, options())
            parts = (layer._qkv, layer._attention_out, layer._up, layer._down)
            copies.append([part._weight for part in parts])
    assert all(a is b is c for a, b, c in zip(*copies, strict=True))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("up", lambda v: v["up"][:, :32]),
        ("down", lambda v: v["down"][:, :32]),
        ("out_norm", lambda v: v["out_norm"][:32]),
    ],
)
def test_weights_of_another_size_are_refused(name, wrong, ours):
    values, offsets, longest = inputs()
    with torch.no_grad():
        values[name] = wrong(values)
        with pytest.raises((RuntimeError, ValueError)):
            InferenceLayer()(values["x"], offsets, longest, weights_of(values), options())
