"""Frozen layers that run without the ways: the same bits as by the ways, and the ways where a call asks for more."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from fastenc.adapt import Lora, add_adaptation
from fastenc.models import Encoder
from fastenc.nn import stack
from fastenc.nn.ways import cpu_inference, cpu_weights, int8_inference
from fastenc.ops import gemm, int8_products
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, model, padded_batch

pytestmark = pytest.mark.skipif(
    not cpu_weights.packed_is_faster(), reason="this processor has no vector kernels"
)
# One op runs all layers of the first batch.
LENGTHS = {"one text": (12,), "many texts": (12, 30, 7) * 6}


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
            patched.setattr(stack, "frozen_stack", lambda *arguments: None)
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


@pytest.mark.parametrize("family", ["bert", "modernbert", "t5"])
def test_a_visit_of_each_layer_s_input_changes_no_bit(family, tmp_path):
    encoder = frozen(save(model(family), tmp_path), "float32")
    batch, seen = packed(padded_batch(family, (12,))), []
    with torch.no_grad():
        output = encoder(batch, output_hidden_states=True)
        visited = encoder(
            batch,
            output_hidden_states=True,
            visit_input=lambda number, x, inputs: seen.append(number),
        )
    assert seen == list(range(encoder.config.num_layers))
    for state, again in zip(output.hidden_states, visited.hidden_states, strict=True):
        assert torch.equal(state, again)


def test_flops_are_those_of_the_plain_model(tmp_path):
    folder, batch = save(model("bert"), tmp_path), packed(padded_batch("bert", (12,)))

    def flops(encoder):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            encoder(batch)
        return counter.get_total_flops()

    assert flops(frozen(folder, "float32")) == flops(Encoder.from_pretrained(folder)) > 0


@pytest.fixture
def call_of_all_layers(tmp_path, monkeypatch):
    """The op, and its arguments in a call of an encoder of two layers."""
    encoder, seen = frozen(save(model("bert"), tmp_path), "float32"), []
    op = torch.ops.fastenc.encoder_layers
    noting = lambda *arguments: (seen.append(arguments), op(*arguments))[1]
    monkeypatch.setattr(torch.ops.fastenc, "encoder_layers", noting)
    with torch.no_grad():
        encoder(packed(padded_batch("bert", (12,))))
    monkeypatch.undo()
    return op, *seen


@pytest.mark.parametrize("output_tokens", [None, torch.tensor([0, 7])])
def test_the_op_of_all_layers_passes_opcheck(output_tokens, call_of_all_layers):
    op, arguments = call_of_all_layers
    arguments = (*arguments[:6], output_tokens, *arguments[7:])
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "place, change, message",
    [
        (5, lambda rotaries: [torch.ones(12, 16)], "a table for each layer, or none"),
        (6, lambda tokens: torch.tensor([12]), r"output_tokens must be in \[0, 12\)"),
        (6, lambda tokens: torch.tensor([0.0]), "output_tokens must be contiguous int64"),
        (7, lambda layers: layers + 1, "fewer arguments than its layers have"),
        (7, lambda layers: layers - 1, "more arguments than its layers have"),
        (9, lambda integers: integers[1:], "encoder_layer"),
    ],
)
def test_the_op_of_all_layers_refuses_other_arguments(place, change, message, call_of_all_layers):
    op, arguments = call_of_all_layers
    wrong = (*arguments[:place], change(arguments[place]), *arguments[place + 1 :])
    with pytest.raises(RuntimeError, match=message):
        op(*wrong)


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
