"""Replaced-token detection of DeBERTa: its head, and embeddings whose gradients are disentangled."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fastenc.models import EncoderConfig
from fastenc.objectives import Electra
from fastenc.packing import pack
from tests.helpers.families import model as hf_model
from tests.helpers.families import padded_batch
from tests.helpers.references import electra as reference

TABLES = {name: f"{name}_embeddings" for name in ("word", "position", "token_type")}
CASES = [
    ("deberta-v2", {}),
    ("deberta", {}),
    ("deberta", dict(position_biased_input=True, type_vocab_size=2, legacy=False)),
]


@pytest.fixture(params=CASES, ids=str)
def parts(request):
    """(our model with random weights and deltas, transformers' generator and encoder of the same configuration)."""
    family, changes = request.param
    generator = hf_model(family, "ForMaskedLM", **changes, num_hidden_layers=1)
    encoder = hf_model(family, **changes)
    torch.manual_seed(3)
    config = EncoderConfig.from_hf(encoder.config.to_dict())
    ours = Electra(
        config, generator_size=1.0, generator_layers=1, embedding_sharing="gradient-disentangled"
    ).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    return ours, generator, encoder


def example():
    batch = padded_batch("deberta")
    mask = batch["attention_mask"].bool()
    labels = torch.where((torch.rand(mask.shape) < 0.4) & mask, batch["input_ids"], -100)
    batch["input_ids"] = torch.where(labels != -100, 3, batch["input_ids"])
    return batch, mask, labels, torch.rand(int((labels != -100).sum()), dtype=torch.float64)


def test_loss_and_gradients_are_those_of_the_formula(parts, tmp_path):
    """With transformers' encoders, a head in plain torch, and E_D = stop_grad(E_G) + delta written out."""
    ours, generator, encoder = parts
    ours.save_pretrained(tmp_path)
    generator = type(generator).from_pretrained(tmp_path / "generator").eval()
    encoder, info = type(encoder).from_pretrained(tmp_path, output_loading_info=True)
    encoder.eval()
    assert not info["missing_keys"]
    batch, mask, labels, draws = example()
    output = ours(pack(batch["input_ids"], batch["attention_mask"]), labels[mask], draws)
    output.loss.backward()

    predicted = generator(**batch, labels=labels)
    ids = batch["input_ids"].clone()
    ids[labels != -100] = reference.sample(predicted.logits[labels != -100].detach(), draws)
    replaced = ids != torch.where(labels != -100, labels, batch["input_ids"])
    own = ours.discriminator.encoder.embeddings
    names = {name: theirs for name, theirs in TABLES.items() if getattr(own, name) is not None}
    shared = {
        name: getattr(generator.deberta.embeddings, theirs).weight for name, theirs in names.items()
    }
    deltas = {name: getattr(own, name).delta.detach().clone().requires_grad_() for name in names}
    weights = {
        f"embeddings.{theirs}.weight": shared[name].detach() + deltas[name]
        for name, theirs in names.items()
    }
    arguments = dict(batch, input_ids=ids)
    hidden = functional_call(encoder, weights, (), arguments).last_hidden_state
    head, size = ours.discriminator, (32,)
    x = F.layer_norm(hidden + hidden[:, :1], size, head.norm.weight, head.norm.bias, 1e-7)
    logits = head.out(F.gelu(head.dense(x)))[mask][:, 0]
    detection = F.binary_cross_entropy_with_logits(logits, replaced[mask].float())
    loss = predicted.loss + 50 * detection
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    for name in names:
        generated = getattr(ours.generator.encoder.embeddings, name).weight.grad
        for gradient, wanted in (
            (generated, shared[name].grad),
            (getattr(own, name).delta.grad, deltas[name].grad),
        ):
            assert wanted.norm() > 0 and (gradient - wanted).norm() < 1e-4 * wanted.norm(), name


def test_a_saved_pair_continues_to_the_last_bit(parts, tmp_path):
    ours = parts[0]
    ours.save_pretrained(tmp_path)
    loaded, state = Electra.from_pretrained(tmp_path), ours.state_dict()
    assert loaded.disentangled and loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    # Without the deltas' file the discriminator still reads the same embeddings.
    (tmp_path / "embedding_delta" / "model.safetensors").unlink()
    (tmp_path / "embedding_delta").rmdir()
    tables = [m.discriminator.encoder.embeddings.word.weight for m in (loaded, ours)]
    again = Electra.from_pretrained(tmp_path).discriminator.encoder.embeddings.word.weight
    torch.testing.assert_close(again, tables[0], rtol=0, atol=1e-6)
    assert torch.equal(*tables)


@pytest.mark.parametrize("family", ["deberta-v2", "deberta"])
def test_a_narrower_generator_of_a_checkpoint_that_names_the_poolers_width(family, tmp_path):
    """As the published files do."""
    encoder = hf_model(family)
    assert encoder.config.pooler_hidden_size == encoder.config.hidden_size == 32
    encoder.save_pretrained(tmp_path / "encoder")
    ours = Electra.from_pretrained(tmp_path / "encoder")
    ours.save_pretrained(tmp_path / "pair")
    assert Electra.from_pretrained(tmp_path / "pair").generator.config.hidden_size == 16
    theirs = hf_model(family, "ForMaskedLM")
    generator = type(theirs).from_pretrained(tmp_path / "pair" / "generator").eval()
    batch = padded_batch(family)
    packed = pack(batch["input_ids"], batch["attention_mask"])
    with torch.no_grad():
        logits = generator(**batch).logits[batch["attention_mask"].bool()]
        torch.testing.assert_close(ours.generator(packed).logits, logits, rtol=0, atol=1e-5)
