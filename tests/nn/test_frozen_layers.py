"""Frozen layers that run without the ways: the same bits as by the ways, and the ways where a call asks for more."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import fastenc
from fastenc.adapt import Lora, add_adaptation
from fastenc.models import Encoder
from fastenc.nn import stack
from fastenc.nn.ways import cpu_inference, int8_inference
from fastenc.ops import gemm, int8_products
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, model, padded_batch

pytestmark = pytest.mark.skipif(
    not cpu_inference.packed_is_faster(), reason="this processor has no vector kernels"
)
LENGTHS = {"one text": (12,), "several": (12, 30, 7)}


def frozen(folder, form):
    if form == "int8":
        if not int8_products.has_int8_products():
            pytest.skip("this processor does not multiply 8 bits")
        return Encoder.from_pretrained(folder, dtype="int8")
    return fastenc.freeze(Encoder.from_pretrained(folder, dtype=getattr(torch, form)))


@pytest.fixture
def by_the_ways(monkeypatch):
    """The encoder's states as the ways compute them."""

    def states(encoder, batch):
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(stack, "runner", lambda *arguments: None)
            return encoder(batch, output_hidden_states=True).hidden_states

    return states


def asked(monkeypatch):
    """The modules whose layers asked a way."""
    seen = set()
    for module in (cpu_inference, int8_inference):
        reason = module.unsupported_reason
        note = lambda call, reason=reason, module=module: (seen.add(module), reason(call))[1]
        monkeypatch.setattr(module, "unsupported_reason", note)
    return seen


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ENCODERS)
def test_every_family_has_the_same_bits(family, form, tmp_path, by_the_ways):
    encoder = frozen(save(model(family), tmp_path), form)
    for lengths in LENGTHS.values():
        batch = packed(padded_batch(family, lengths))
        expected = by_the_ways(encoder, batch)
        with torch.no_grad():
            ours = encoder(batch, output_hidden_states=True).hidden_states
        for state, by_ways in zip(ours, expected, strict=True):
            assert torch.equal(state, by_ways)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_a_plain_call_asks_no_way(form, tmp_path, monkeypatch):
    if form == "bfloat16" and not (gemm.emulates_bfloat16() or gemm.multiplies_pairs()):
        pytest.skip("this processor's PyTorch multiplies bfloat16")
    encoder = frozen(save(model("bert"), tmp_path), form)
    seen = asked(monkeypatch)
    with torch.no_grad():
        encoder(packed(padded_batch("bert", (12,))))
    assert not seen


def with_hook(encoder):
    encoder.layers[1].register_forward_hook(lambda module, given, state: state._replace(x=-state.x))


def with_another_forward(encoder):
    layer = encoder.layers[1]
    forward = layer.forward
    layer.forward = lambda *given: (state := forward(*given))._replace(x=-state.x)


def with_adaptation(encoder):
    add_adaptation(encoder, Lora(rank=2))
    for name, parameter in encoder.named_parameters():
        if "adaptations" in name:
            torch.nn.init.ones_(parameter)


@pytest.mark.parametrize("change", [with_hook, with_another_forward, with_adaptation])
def test_what_is_added_to_a_layer_is_computed(change, tmp_path, by_the_ways):
    encoder = frozen(save(model("bert"), tmp_path), "float32")
    batch = packed(padded_batch("bert", (12,)))
    before = by_the_ways(encoder, batch)[-1]
    change(encoder)
    fastenc.freeze(encoder.eval())
    with torch.no_grad():
        state = encoder(batch).last_hidden_state
    assert not torch.allclose(state, before, atol=0.1)
    assert torch.equal(state, by_the_ways(encoder, batch)[-1])


def test_hooks_of_all_modules_run(tmp_path):
    encoder = frozen(save(model("bert"), tmp_path), "float32")
    seen = []
    handle = register_module_forward_hook(lambda module, given, state: seen.append(module))
    try:
        with torch.no_grad():
            encoder(packed(padded_batch("bert", (12,))))
    finally:
        handle.remove()
    assert set(encoder.layers) <= set(seen)


def test_autocast_is_computed(tmp_path):
    encoder = frozen(save(model("bert"), tmp_path), "float32")
    batch = packed(padded_batch("bert", (12,)))
    with torch.no_grad():
        exact = encoder(batch).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            cast = encoder(batch).last_hidden_state
    assert not torch.equal(cast.float(), exact)
    torch.testing.assert_close(cast.float(), exact, atol=0.1, rtol=0)


def test_another_number_of_threads_has_the_same_bits(tmp_path):
    encoder = frozen(save(model("bert"), tmp_path), "float32")
    batch = packed(padded_batch("bert", (12, 30, 7)))
    threads, states = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            with torch.no_grad():
                states.append(encoder(batch).last_hidden_state)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*states)
