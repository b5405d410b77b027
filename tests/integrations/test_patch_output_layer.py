"""The output layer of patched encoder-decoders: the logits are those of its float32 weight, also in 8 bits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import fastenc
from fastenc.ops import int8_products
from tests.helpers.checkpoints import close
from tests.helpers.extension import needs_cpp
from tests.helpers.families import whole
from tests.integrations.test_live_model import Loud, set_weight

pytestmark = [
    needs_cpp,
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning"),
]
needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)


def patched(family="bart"):
    return fastenc.patch(whole(family).eval())


def states_of(model, *shape):
    return torch.randn(
        *shape, model.lm_head.in_features, generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def error_of(model, x):
    """The relative error of the output layer of a model, whose weight is in float32."""
    head = model.lm_head
    exact = F.linear(x.double(), head.weight.double())
    return float((head(x) - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", ["t5-gated", "bart", "marian", "m2m_100"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (130,)])
def test_logits_in_float32(family, shape):
    model = patched(family)
    assert error_of(model, states_of(model, *shape)) < 1e-6
    assert error_of(fastenc.freeze(model), states_of(model, *shape)) < 1e-6


def test_logits_in_bfloat16():
    model = patched().bfloat16()
    assert error_of(model, states_of(model, 3, 4).bfloat16()) < 2e-3


@needs_int8
@pytest.mark.parametrize("family", ["t5-gated", "bart", "marian", "m2m_100"])
def test_logits_in_8_bits(family):
    """The vocabularies of these models are no multiples of 16."""
    model = patched(family)
    x = states_of(model, 2, 3)
    with torch.no_grad():
        shape = fastenc.freeze(model, dtype="int8").lm_head(x).shape
    assert shape == (2, 3, model.lm_head.out_features)
    assert 1e-4 < error_of(model, x) < 0.02
    assert error_of(fastenc.unfreeze(model), x) < 1e-6


def trained(model):
    model.train().eval()


def with_gradients(model):
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[7, 8]])).loss.backward()


def loaded(model):
    model.load_state_dict(model.state_dict())


def resized(model):
    model.resize_token_embeddings(110)  # in 8 bits as many rows as before


def tied_to_other_embeddings(model):
    model.set_input_embeddings(torch.nn.Embedding(97, 32))
    model.tie_weights()


def with_lora(model):
    """It is added to a frozen model, which computes with it once."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]), decoder_input_ids=torch.tensor([[7]]))
    model.lm_head = model.lm_head.base_layer


ENDS = [trained, with_gradients, loaded, resized, tied_to_other_embeddings, with_lora]


@needs_int8
@pytest.mark.parametrize("end", ENDS)
def test_what_ends_8_bits(end):
    model = fastenc.freeze(patched(), dtype="int8")
    x = states_of(model, 2)
    assert error_of(model, x) > 1e-4
    end(model)
    assert error_of(model, x) < 1e-6


@needs_int8
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_not_frozen_and_can_be(copied):
    model = fastenc.freeze(patched(), dtype="int8")
    other, x = copied(model), states_of(model, 2)
    assert error_of(other, x) < 1e-6
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
        frozen = fastenc.freeze(other, dtype="int8").lm_head(x)
        close(frozen, 2 * model.lm_head(x), atol=1e-5)


@needs_int8
def test_lora_must_be_merged():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(patched(), settings).eval()
    with pytest.raises(ValueError, match=r"output layer.* without LoRA, got peft.*Linear: merge"):
        fastenc.freeze(model, dtype="int8")
    merged = model.merge_and_unload()
    x = states_of(merged, 2)
    assert 1e-4 < error_of(fastenc.freeze(merged, dtype="int8"), x) < 0.02


def test_other_calls_have_the_layers_own_results():
    model, x = patched(), states_of(patched(), 2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = model.lm_head(x), F.linear(x, model.lm_head.weight)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    close(ours.float(), theirs.float(), atol=1e-2)
    assert model.lm_head(x).requires_grad
    with torch.no_grad():
        traced = torch.jit.trace(model.lm_head, (x,))
    assert not any("fastenc" in node.kind() for node in traced.graph.nodes())
    assert "forward" not in fastenc.unpatch(model).lm_head.__dict__
    assert [*model.lm_head.named_modules()] == [("", model.lm_head)]


@pytest.mark.parametrize(
    "change", [lambda weight: weight.as_subclass(Loud), torch.Tensor.to_sparse]
)
def test_a_weight_that_is_no_dense_tensor(change):
    """As quantisation libraries have them: torch computes the product."""
    model, x = patched(), states_of(patched(), 2)
    weight = model.lm_head.weight.detach()
    set_weight(model.lm_head, change)
    with torch.no_grad():
        close(model.lm_head(x), F.linear(x, change(weight)))
    with pytest.raises(ValueError, match=r"output layer .* a weight is .*: leave out dtype"):
        fastenc.freeze(model, dtype="int8")


def test_a_replaced_output_layer():
    model = patched()
    model.resize_token_embeddings(120)
    x = states_of(model, 2)
    assert error_of(model, x) < 1e-6
    if int8_products.has_int8_products():
        assert error_of(fastenc.freeze(model, dtype="int8"), x) < 0.02
