"""A layer without gradients in two CPU ops, compared with torch's own functions."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastenc.nn.layer import run_single_ops
from fastenc.nn.layer_call import Prepared
from fastenc.nn.ways import cpu_weights
from fastenc.nn.ways.cpu_inference import run_cpu_inference, unsupported_reason
from fastenc.nn.ways.cpu_weights import pack
from fastenc.ops import gemm
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import KINDS, Layer, layer_variant, widened

pytestmark = needs_cpp
EVERY_VARIANT = pytest.mark.parametrize("name", KINDS)
MANY = (20,) * 20


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def emulated(monkeypatch):
    """A processor without bfloat16 units, which computes bfloat16 products in float32."""
    monkeypatch.setattr(gemm, "emulates_bfloat16", lambda: True)


def check(layer, **options):
    with torch.no_grad():
        results = layer.run(run_cpu_inference, **options)
        plain, truth = layer.plain(), layer.plain(widened(layer.values))
    for ours, theirs, exact in zip(results, plain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert_within_budget(ours, theirs, exact)


@EVERY_VARIANT
@pytest.mark.parametrize("frozen", [False, True], ids=["packed in the call", "packed before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [MANY, (130, 7, 250)], ids=["many", "long"])
def test_every_kind(name, frozen, dtype, lengths, emulated):
    layer = Layer(KINDS[name], lengths, dtype)
    check(layer, prepared=Prepared(packed=pack(layer.weights()) if frozen else None))


@EVERY_VARIANT
@pytest.mark.parametrize("form", ["plain", "frozen", "emulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [(1,), (3, 0, 20)], ids=str)
def test_few_rows(name, form, dtype, lengths, monkeypatch):
    monkeypatch.setattr(gemm, "emulates_bfloat16", lambda: form == "emulated")
    layer = Layer(KINDS[name], lengths, dtype)
    check(layer, prepared=Prepared(packed=pack(layer.weights()) if form == "frozen" else None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_few_rows_by_every_instruction_set(dtype, instruction_set, threads):
    check(Layer(KINDS["bert"], (20, 0, 5), dtype))


# 336 columns are more than the kernel computes at a time, and no whole number of panels.
@pytest.mark.parametrize(
    ("activation", "inner", "gated"),
    [("gelu", 96, False), ("gelu", 336, False), ("gelu_tanh", 336, False), ("silu", 336, True)],
)
@pytest.mark.parametrize(
    "lengths", [EDGE_LENGTHS, (1,), (0,), (130, 7, 250), (3,) * 150, (0, 90, 0, 0, 40, 1, 0)]
)
def test_widths_and_lengths(lengths, activation, inner, gated, instruction_set, threads):
    check(Layer(layer_variant(activation, inner=inner, gated=gated), lengths))


def test_rows_do_not_depend_on_those_beside_them(monkeypatch):
    # Both runs then give a thread whole sequences.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    layer = Layer(KINDS["bert"], (7, 130, 250), grad=False)
    (whole,) = layer.run(run_cpu_inference)
    layer.values["x"], layer.offsets = layer.values["x"][7:137], layer.offsets.new_tensor([0, 130])
    layer.longest = 130
    (alone,) = layer.run(run_cpu_inference)
    assert torch.equal(whole[7:137], alone)


@EVERY_VARIANT
def test_agrees_with_single_ops(name):
    layer = Layer(KINDS[name], MANY, grad=False)
    for ours, theirs in zip(layer.run(run_cpu_inference), layer.run(run_single_ops), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def reason(layer):
    with torch.no_grad():
        return unsupported_reason(layer.layer_call())


def test_unsupported_layers_have_a_reason(monkeypatch):
    monkeypatch.setattr(gemm, "has_vectors", lambda: True)
    monkeypatch.setattr(gemm, "emulates_bfloat16", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer = Layer(KINDS["bert"], MANY)
    assert reason(layer) is None
    assert unsupported_reason(layer.layer_call()) == "gradients are on"
    assert "multiples of 16" in reason(Layer(layer_variant(inner=40), MANY))
    wide = replace(layer.spec, attention=replace(layer.spec.attention, head_dim=528))
    assert "at most 512, it is 528" in cpu_weights.weights_reason(layer.weights(), wide)
    assert "float64" in reason(Layer(KINDS["bert"], MANY, torch.float64))
    monkeypatch.setattr(gemm, "multiplies_pairs", lambda: False)
    assert "multiplies bfloat16 faster" in reason(Layer(KINDS["bert"], MANY, torch.bfloat16))
    monkeypatch.setattr(gemm, "multiplies_pairs", lambda: True)
    assert reason(Layer(KINDS["bert"], MANY, torch.bfloat16)) is None
    assert reason(Layer(KINDS["bert"], (20, 20), torch.bfloat16)) is None
    monkeypatch.setattr(cpu_weights, "packed_is_faster", lambda: False)
    assert "AVX2" in reason(layer)


@pytest.mark.parametrize("name", ["up", "down", "out_norm", "attention_norm"])
def test_weights_of_another_size_are_refused(name):
    layer = Layer(KINDS["bert"], MANY, grad=False)
    wrong = layer.values[name][..., :32]
    layer.values[name] = wrong
    with pytest.raises(RuntimeError, match=r"\bencoder_layer_after_attention: a .* must"):
        layer.run(run_cpu_inference)


@pytest.mark.parametrize("lengths", [(3, 20), MANY], ids=["few rows", "many rows"])
def test_few_rows_run_in_the_same_two_ops(lengths):
    layer, seen = Layer(next(iter(KINDS.values())), lengths, torch.float32), set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with torch.no_grad(), Seen():
        layer.run(run_cpu_inference)
    ours = {name for name in seen if name in dir(torch.ops.fastenc)}
    assert ours == {"encoder_layer_attention", "encoder_layer_after_attention"}
