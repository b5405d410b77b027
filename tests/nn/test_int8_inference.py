"""A layer whose products are in 8 bits, beside torch's own functions with the products of the formula."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.nn.layer_call import Prepared
from fastenc.nn.ways import int8_inference
from fastenc.nn.ways.int8_inference import pack, run_int8_inference, unsupported_reason
from fastenc.ops import int8_products, library
from fastenc.reference.int8_linear import int8_linear
from tests.helpers.layers import KINDS, Layer, layer_variant

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
TAKEN = [name for name in KINDS if not KINDS[name].spec.attention.position_terms]
EVERY_VARIANT = pytest.mark.parametrize("name", TAKEN)
MANY, LONG, FEW = (20,) * 20, (130, 7, 250), (3, 0, 20)


def prepared(layer):
    with torch.no_grad():
        return Prepared(int8=pack(layer.weights(), layer.spec))


def run(layer):
    with torch.no_grad():
        return layer.run(run_int8_inference, prepared=prepared(layer))


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(params=["float32", "bfloat16"])
def attention(request, monkeypatch):
    """Attention in either of its dtypes, whichever the processor would choose; how far its results may be off."""
    bf16 = request.param == "bfloat16"
    if bf16 and not library._C.build_info()["bfloat16_panels"]:
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(int8_products, "attends_in_bfloat16", lambda: bf16)
    # A value that rounds otherwise in front of a product moves by a step of 8 bits. A norm of a sublayer's output
    # scales its rounding too.
    return 0.015 if bf16 else 0.002


def check(layer, allowed, monkeypatch):
    with torch.no_grad():
        exact = layer.plain()
        with monkeypatch.context() as patched:
            patched.setattr(F, "linear", int8_linear)
            formula = layer.plain()
    for ours, expected, floats in zip(run(layer), formula, exact, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == floats.shape
        assert relative_error(ours, expected) < allowed
        assert relative_error(ours, floats) < 0.025


@EVERY_VARIANT
@pytest.mark.parametrize("lengths", [MANY, LONG, FEW], ids=["many", "long", "few"])
def test_every_kind(name, lengths, attention, monkeypatch):
    layer = Layer(KINDS[name], lengths)
    # A layer with vectors has six products in a row instead of four.
    products = 1.5 if layer.spec.layer_vector_size else 1.0
    check(layer, attention * products, monkeypatch)


@EVERY_VARIANT
def test_attention_in_either_dtype_is_near_the_other(name, monkeypatch):
    if not library._C.build_info()["bfloat16_panels"]:
        pytest.skip("this processor has no AVX512-BF16")
    results = []
    for bf16 in (False, True):
        monkeypatch.setattr(int8_products, "attends_in_bfloat16", lambda bf16=bf16: bf16)
        results.append(run(Layer(KINDS[name], MANY, grad=False)))
    for floats, rounded in zip(*results, strict=True):
        assert 0 < relative_error(rounded, floats) < 0.015


# Several groups, a last group that lacks columns, and slabs of them; two panels of a gated layer.
@pytest.mark.parametrize("inner", [48, 400, 448, 1024])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_inner_widths(inner, gated, monkeypatch):
    monkeypatch.setattr(int8_products, "attends_in_bfloat16", lambda: False)
    what = layer_variant("silu" if gated else "gelu", inner=inner, gated=gated)
    for lengths in (MANY, FEW):
        check(Layer(what, lengths), 0.002, monkeypatch)


def sequences(layer, order):
    """The layer over these of its sequences."""
    part = Layer(layer.variant, [layer.lengths[i] for i in order])
    part.values = dict(layer.values)
    for name in {"x", "vectors"} & layer.values.keys():
        parts = layer.values[name].split(list(layer.lengths))
        part.values[name] = torch.cat([parts[i] for i in order])
    return part


@EVERY_VARIANT
def test_a_sequence_does_not_depend_on_batch_order_and_threads(name, attention):
    lengths = (20,) * 30 + (7, 150, 1, 64)
    layer = Layer(KINDS[name], lengths, grad=False)
    whole = run(layer)
    before = torch.get_num_threads()
    try:
        for order in (range(len(lengths)), [33, 31, 0, 30, 2], [30], [31]):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for part, all_rows in zip(run(sequences(layer, order)), whole, strict=True):
                    rows = all_rows.split(lengths)
                    assert torch.equal(part, torch.cat([rows[i] for i in order]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["deberta", "deberta v2"])
def test_relative_positions_stay_in_float32(name):
    layer = Layer(KINDS[name], MANY, grad=False)
    for ours, floats in zip(run(layer), layer.plain(), strict=True):
        assert relative_error(ours, floats) < 0.025


def test_nan_stays_in_its_sequence():
    layer = Layer(KINDS["bert"], MANY, grad=False)
    (whole,) = run(layer)
    layer.values["x"] = layer.values["x"].clone()
    layer.values["x"][45, 3] = torch.nan
    (y,) = run(layer)
    assert y[45].isnan().all()
    assert torch.equal(y[:40], whole[:40]) and torch.equal(y[60:], whole[60:])


def reason(layer, **rest):
    with torch.no_grad():
        return unsupported_reason(layer.layer_call(prepared=prepared(layer), **rest))


def test_what_it_cannot_take_it_says(monkeypatch):
    layer = Layer(KINDS["bert"], MANY)
    assert reason(layer) is None
    assert unsupported_reason(layer.layer_call()) == "its weights are not frozen in int8"
    assert unsupported_reason(layer.layer_call(prepared=prepared(layer))) == "gradients are on"
    with torch.autocast("cpu", torch.bfloat16):
        assert reason(layer) == "autocast is on"
    of_weights = lambda layer: int8_inference.weights_reason(layer.weights(), layer.spec)
    assert of_weights(layer) is None
    assert "multiples of 16" in of_weights(Layer(layer_variant(inner=40), MANY))
    with monkeypatch.context() as patched:
        patched.setattr(int8_inference, "TAKES", int8_inference.TAKES - {"position_terms"})
        assert "does not compute position_terms" in of_weights(Layer(KINDS["deberta"], MANY))
    assert "float32" in of_weights(Layer(KINDS["bert"], MANY, torch.bfloat16))
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: False)
    assert "AVX512-VNNI" in of_weights(layer)


def test_weights_of_another_size_are_refused():
    layer = Layer(KINDS["bert"], MANY, grad=False)
    copies = prepared(layer).int8
    for name, op in (("qkv", "attention"), ("up", "after_attention"), ("down", "after_attention")):
        wrong = Prepared(
            int8=copies._replace(**{name: getattr(copies, name)[:, :-64].contiguous()})
        )
        with pytest.raises(RuntimeError, match=f"int8_layer_{op}: a weight must be"):
            layer.run(run_int8_inference, prepared=wrong)
