"""What a forward does once for all layers: drawing random states, casting weights, finding bounds of sequences."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.nn import cast_weights as casts
from fastenc.nn.layer_dropout import LayerDropout, with_rng_states
from fastenc.nn.ways.fused_sublayers import run_fused_sublayers
from fastenc.ops import attention, layer_norm
from fastenc.ops.attention import sequence_bounds
from fastenc.packing import pack_sequences
from tests.helpers.attention_cases import packed
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.layers import KINDS, Layer, gradients

CONFIG = EncoderConfig(97, 32, 3, 2, 48, 40)
BATCH = pack_sequences([[1, 2, 3], [4], [5, 6, 7, 8]])


class Calls(TorchDispatchMode):
    """Counts the ops that run in the context."""

    def __init__(self):
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.of[function._schema.name] += 1
        return function(*arguments, **(keywords or {}))


def train(m, forward) -> Counter[str]:
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        forward(m.train()).last_hidden_state.float().square().sum().backward()
    return calls.of


def an_encoder():
    return Encoder(CONFIG), lambda m: m(BATCH)


def a_patched_model():
    batch = padded_batch("bert")
    return fastenc.patch(model("bert", "Model")), lambda m: m(**batch)


SUBJECTS = {"encoder": an_encoder, "patched": a_patched_model}


@needs_cpp
@pytest.mark.parametrize("subject", SUBJECTS)
def test_masks_are_drawn_and_weights_cast_together(subject):
    calls = train(*SUBJECTS[subject]())
    assert calls["aten::randint"] == 2  # one for the embeddings' mask, one for those of all layers
    layers = calls["fastenc::attention_fwd"]
    # One cast for all layers in the forward, and one for each sublayer's gradients in the backward.
    assert layers >= 2 and calls["aten::_foreach_copy_"] == 1 + 2 * layers


@needs_cpp
@pytest.mark.parametrize("subject", SUBJECTS)
def test_casts_made_together_change_no_bit(subject, monkeypatch):
    grads = []
    for together in (True, False):
        torch.manual_seed(3)
        m, forward = SUBJECTS[subject]()
        if not together:
            none = lambda x, layers: None
            monkeypatch.setattr("fastenc.nn.stack.cast_weights", none)
        train(m, forward)
        grads.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 20
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_when_weights_are_not_cast_together():
    weights = [Layer(KINDS["bert"]).weights()]
    x = torch.randn(4, weights[0].down_weight.shape[0])
    assert casts.cast_weights(x, weights) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert casts.cast_weights(x, weights)[0].down_weight.dtype == torch.bfloat16
        with torch.no_grad():
            assert casts.cast_weights(x, weights) is None
        half = [Layer(KINDS["bert"], dtype=torch.bfloat16).weights()]
        assert casts.cast_weights(x, half) is None
        frozen = [Layer(KINDS["bert"], grad=False).weights()]
        assert casts.cast_weights(x, frozen) is None


def test_recomputed_layers_get_the_masks_of_their_forward():
    m = Encoder(CONFIG).train()
    grads = []
    for recomputed in (False, True):
        m.gradient_checkpointing = recomputed
        m.zero_grad()
        torch.manual_seed(5)
        m(BATCH).last_hidden_state.square().sum().backward()
        grads.append([p.grad for p in m.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@needs_cpp
@pytest.mark.parametrize("subject", SUBJECTS)
def test_recomputed_layers_cast_their_weights_again(subject):
    grads = []
    for recomputed in (False, True):
        torch.manual_seed(3)
        m, forward = SUBJECTS[subject]()
        if recomputed and subject == "patched":
            m.gradient_checkpointing_enable()
        elif recomputed:
            m.gradient_checkpointing = True
        train(m, forward)
        grads.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 20
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


def test_every_mask_of_a_forward_is_another():
    device = torch.device("cpu")
    encoder = LayerDropout(0.1, 0.1, 0.0, 0.1)
    for layer, masks in ((encoder, 3), (encoder._replace(cross=0.1), 5)):
        drawn = with_rng_states([layer] * 4, device)
        given = [state for dropout in drawn for state in dropout.rng_states if state is not None]
        assert len({tuple(state.tolist()) for state in given}) == len(given) == 4 * masks
    without = [LayerDropout(), LayerDropout()]
    before = torch.get_rng_state()
    assert with_rng_states(without, device) == without
    assert torch.equal(torch.get_rng_state(), before)


@needs_cpp
def test_a_layer_draws_the_masks_that_it_is_given():
    layer = Layer(KINDS["bert"], (5, 3))
    (dropout,) = with_rng_states([LayerDropout(0.2, 0.2, 0.0, 0.2)], torch.device("cpu"))
    once = lambda: gradients(
        layer.results(run_fused_sublayers(layer.layer_call(dropout))), layer.values
    )
    first, second = once(), once()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_mask_by_a_given_state(impl):
    state, x = torch.tensor([3, 4]), torch.randn(5, 32)
    qkv, cu_seqlens, longest = packed((5, 3), 2, 16)
    for dropped in (
        lambda s: layer_norm(x, dropout_p=0.5, rng_state=s, impl=impl),
        lambda s: attention(qkv, cu_seqlens, longest, dropout_p=0.5, rng_state=s, impl=impl),
    ):
        assert torch.equal(dropped(state), dropped(state))
        assert not torch.equal(dropped(state), dropped(torch.tensor([3, 5])))
        for wrong in (torch.tensor([3]), torch.tensor([3, 4], dtype=torch.int32)):
            with pytest.raises(ValueError, match=r"rng_state must be int64 of shape \(2,\)"):
                dropped(wrong)


def test_bounds_are_those_of_the_sequences(triton_target):
    lengths = (5, 0, 30, 1, 28)
    cu_seqlens = torch.tensor([0, 5, 5, 35, 36, 64], dtype=torch.int32, device=triton_target.device)
    bounds = torch.ops.fastenc.sequence_bounds(cu_seqlens, 64, 30)
    for row, ends in zip(bounds, (cu_seqlens[:-1], cu_seqlens[1:]), strict=True):
        assert torch.equal(row, ends.repeat_interleave(torch.tensor(lengths).to(ends.device)))
    assert torch.ops.fastenc.sequence_bounds(cu_seqlens[:1], 0, 0).shape == (2, 0)


def test_attention_takes_bounds_made_before(triton_target):
    qkv, cu_seqlens, longest = packed((5, 30, 1), 2, 16, torch.float16)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens = cu_seqlens.to(triton_target.device)
    bounds = torch.ops.fastenc.sequence_bounds(cu_seqlens, qkv.shape[0], longest)
    results = []
    for given in (None, bounds):
        with Calls() as calls:
            out = attention(qkv, cu_seqlens, longest, bounds=given, impl=triton_target.impl)
            results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
        assert "fastenc::sequence_bounds" not in calls.of
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"bounds must be int32 of shape \(2, 36\)"):
        attention(qkv, cu_seqlens, longest, bounds=bounds[:, 1:])


def test_no_bounds_where_no_kernel_needs_them():
    assert sequence_bounds(torch.zeros(8, 4), BATCH.cu_seqlens, 4) is None


def test_shared_layers_draw_masks_for_each_use():
    config = replace(CONFIG, family="albert", embedding_size=16, hidden_dropout_p=0.1)
    m = Encoder(config).train()
    assert len(m.layers) == 1
    torch.manual_seed(0)
    with Calls() as calls:
        m(BATCH)
    assert calls.of["aten::randint"] <= 2
