"""encoder_of: a patched model's Encoder computes the same as the model itself and as its checkpoint."""

import copy

import pytest
import torch

import fastenc
from fastenc.adapt import (
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    freeze_encoder,
    load_adaptation,
    merge_adaptation,
    unmerge_adaptation,
    use_adaptation,
)
from fastenc.analysis import summarize_heads
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.nn.stack import StackSpec
from tests.helpers.adaptations import disturb
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, dropouts, model, padded_batch
from tests.helpers.patching import assert_same_gradients


def with_encoder(family, **changes):
    theirs = model(family, **changes)
    patched = fastenc.patch(copy.deepcopy(theirs))
    return theirs, patched, fastenc.encoder_of(patched)


@pytest.mark.parametrize("family", ENCODERS)
def test_states_are_those_of_the_model(family):
    theirs, _, encoder = with_encoder(family)
    batch = padded_batch(family)
    seen = []
    with torch.no_grad():
        expected = theirs(**batch, output_hidden_states=True).hidden_states
        visit = lambda number, state: seen.append((number, state.clone()))
        output = encoder(packed(batch), output_hidden_states=True, visit=visit)
    mask = batch["attention_mask"].bool()
    assert [number for number, _ in seen] == list(range(len(expected)))
    for ours, visited in zip(output.hidden_states, seen, strict=True):
        assert torch.equal(ours, visited[1])
    *states, last = output.hidden_states
    # transformers' last state is the output, which a linear layer may make of ours.
    states.append(encoder.project_output(last))
    for ours, state in zip(states, expected, strict=True):
        torch.testing.assert_close(ours, state[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "albert", "big_bird"])
@torch.no_grad()
def test_first_states_through_the_models_pooler(family):
    theirs, _, encoder = with_encoder(family)
    batch = padded_batch(family)
    expected = theirs(**batch)
    first = encoder.first_states(packed(batch))
    torch.testing.assert_close(first, expected.last_hidden_state[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        encoder.pool_first(first), expected.pooler_output, rtol=1e-4, atol=1e-4
    )


def test_an_encoder_without_a_pooler_pools_no_first_states():
    _, _, encoder = with_encoder("modernbert")
    with pytest.raises(ValueError, match="an encoder with a pooler, got one without"):
        encoder.pool_first(torch.ones(1, 32))


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "t5"])
def test_gradients_reach_the_model(family):
    theirs, patched, encoder = with_encoder(family)
    batch = padded_batch(family)
    encoder(packed(batch)).last_hidden_state.square().sum().backward()
    hidden = theirs(**batch).last_hidden_state
    hidden[batch["attention_mask"].bool()].square().sum().backward()
    assert_same_gradients(patched, theirs)


def test_it_is_the_encoder_of_the_saved_checkpoint(tmp_path):
    theirs, patched, encoder = with_encoder("bert")
    save(theirs, tmp_path)
    loaded, batch = fastenc.Encoder.from_pretrained(tmp_path), packed(padded_batch("bert"))
    with torch.no_grad():
        ours, expected = encoder(batch), loaded(batch)
        assert torch.equal(ours.last_hidden_state, expected.last_hidden_state)
        torch.testing.assert_close(ours.pooled, expected.pooled)
        fastenc.freeze(patched)
        assert encoder.frozen.current() is not None
        frozen = encoder(batch).last_hidden_state
        torch.testing.assert_close(frozen, fastenc.freeze(loaded)(batch).last_hidden_state)
    assert encoder.layer_ways() == loaded.layer_ways() and isinstance(encoder.stack, StackSpec)


def test_words_texts_and_heads_of_real_weights():
    transformers = pytest.importorskip("transformers")
    from fastenc.demo.checkpoint import minilm_folder

    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    patched = fastenc.patch(transformers.AutoModel.from_pretrained(folder))
    encoder, loaded = (
        fastenc.encoder_of(patched, tokenizer),
        fastenc.Encoder.from_pretrained(folder),
    )
    texts = ["The river bank was muddy.", "A bank lends money to people who can pay it back."]
    options = {"pooling": "mean", "normalize": True}
    torch.testing.assert_close(encoder.encode(texts, **options), loaded.encode(texts, **options))
    words = [text.split() for text in texts]
    torch.testing.assert_close(
        encoder.embed_words(words).vectors, loaded.embed_words(words).vectors
    )
    ours, expected = summarize_heads(encoder, texts), summarize_heads(loaded, texts)
    assert ours.tokens == expected.tokens > 10
    for name, means in expected.means.items():
        torch.testing.assert_close(ours.means[name], means)


def test_the_mode_and_the_weights_are_the_models():
    _, patched, encoder = with_encoder("bert")
    batch = packed(padded_batch("bert"))
    encoder.train()
    assert patched.training and encoder.training
    patched.eval()
    assert not encoder.training
    with torch.no_grad():
        before = encoder(batch).last_hidden_state
        patched.encoder.layer[0].output.dense.weight.mul_(2)
        assert not torch.equal(encoder(batch).last_hidden_state, before)


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_a_model_in_training_computes_without_dropout_for_encode(family):
    """encode, embed_words and their kin do so in either mode, and leave the mode."""
    probabilities = {name: 0.3 for name in dropouts(family)}
    theirs, patched, encoder = with_encoder(family, **probabilities)
    batch = padded_batch(family)
    expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
    patched.train()
    states = lambda: encoder(packed(batch)).last_hidden_state
    with without_dropout():
        torch.testing.assert_close(states(), expected, rtol=1e-4, atol=1e-4)
    assert patched.training
    assert not torch.allclose(states(), expected, rtol=0.1, atol=0.1)


def test_pefts_lora_of_a_model_in_training_has_no_dropout_in_encode():
    peft = pytest.importorskip("peft")
    _, patched, _ = with_encoder("bert", **dropouts("bert"))
    config = peft.LoraConfig(target_modules=["query"], lora_dropout=0.5, init_lora_weights=False)
    with_lora = peft.get_peft_model(patched, config)
    encoder, batch = fastenc.encoder_of(with_lora.eval()), packed(padded_batch("bert"))
    with torch.no_grad():
        expected = encoder(batch).last_hidden_state
        with_lora.train()
        with without_dropout():
            assert torch.equal(encoder(batch).last_hidden_state, expected)
        assert not torch.equal(encoder(batch).last_hidden_state, expected)


METHODS = (
    Lora(rank=2, targets=("attention_out", "down")),
    Lora(rank=2),
    Adapters(4),
    PrefixTuning(3),
    PromptTuning(2),
)


def adapted_pair(family, method, tmp_path):
    """(patched model, its encoder, the encoder loaded from its checkpoint), both with the same adaptation."""
    theirs = model(family)
    save(theirs, tmp_path)
    patched = fastenc.patch(type(theirs).from_pretrained(tmp_path).eval())
    encoder, loaded = fastenc.encoder_of(patched), fastenc.Encoder.from_pretrained(tmp_path)
    add_adaptation(loaded, method)
    disturb(loaded)
    loaded.save_pretrained(tmp_path / "adapted")
    load_adaptation(encoder, tmp_path / "adapted")
    return patched, encoder, loaded


@pytest.mark.parametrize("family", ["bert", "albert", "modernbert", "t5"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_adaptations_are_those_of_an_encoder(family, method, tmp_path):
    if family != "bert" and isinstance(method, PrefixTuning):
        pytest.skip("these architectures take no prefix")
    if family == "modernbert" and method == METHODS[1]:
        method = Lora(rank=2, targets=("qkv",))
    patched, encoder, loaded = adapted_pair(family, method, tmp_path)
    batch = packed(padded_batch(family))
    gradients = []
    for each in (encoder, loaded):
        output = each(batch).last_hidden_state
        output.square().sum().backward()
        trained = {
            name: p.grad
            for name, p in each.named_parameters()
            if p.requires_grad and "model." not in name
        }
        gradients.append((output.detach(), trained))
    (ours, of_ours), (expected, of_loaded) = gradients
    torch.testing.assert_close(ours, expected)
    assert of_ours.keys() == of_loaded.keys() and of_ours
    for name, gradient in of_loaded.items():
        torch.testing.assert_close(of_ours[name], gradient)
    assert not any(p.requires_grad for p in patched.parameters())
    encoder.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "adapted" / "adapter_model.safetensors"
    ).read_bytes()
    use_adaptation(encoder, None)
    plain = fastenc.Encoder.from_pretrained(tmp_path)
    assert torch.equal(encoder(batch).last_hidden_state, plain(batch).last_hidden_state)


def test_a_merged_adaptation_is_in_the_model(tmp_path):
    patched, encoder, _ = adapted_pair("bert", Lora(rank=2), tmp_path)
    inputs = padded_batch("bert")
    before = patched(**inputs).last_hidden_state
    merge_adaptation(encoder)
    merged = patched(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    torch.testing.assert_close(merged, encoder(packed(inputs)).last_hidden_state)
    unmerge_adaptation(encoder)
    assert torch.equal(patched(**inputs).last_hidden_state, before)
    assert not torch.allclose(merged, before[inputs["attention_mask"].bool()])


def test_layers_are_frozen_in_the_model_and_added_modules_follow_its_mode(tmp_path):
    patched, encoder, _ = adapted_pair("bert", Lora(rank=2, dropout_p=0.5), tmp_path)
    patched.requires_grad_(True)
    freeze_encoder(encoder, layers=1)
    assert not any(p.requires_grad for p in patched.embeddings.parameters())
    assert not any(p.requires_grad for p in patched.encoder.layer[0].parameters())
    assert all(p.requires_grad for p in patched.encoder.layer[1].parameters())
    patched.train()
    encoder(packed(padded_batch("bert")))
    assert encoder.layers[0].adapted().training
    patched.eval()
    batch = packed(padded_batch("bert"))
    assert torch.equal(encoder(batch).last_hidden_state, encoder(batch).last_hidden_state)


def test_pefts_lora_and_ours_in_one_layer_is_an_error(tmp_path):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model("bert"), peft.LoraConfig(target_modules=["query"]))
    fastenc.patch(wrapped)
    encoder = fastenc.encoder_of(wrapped)
    add_adaptation(encoder, Lora(rank=2))
    with pytest.raises(ValueError, match=r"got PEFT's LoRA and one of fastenc.adapt"):
        encoder(packed(padded_batch("bert")))


def test_it_is_saved_as_the_model(tmp_path):
    theirs, _, encoder = with_encoder("bert")
    encoder.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    name = "model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_what_it_cannot_take():
    with pytest.raises(ValueError, match=r"call fastenc.patch\(model\) first"):
        fastenc.encoder_of(model("bert"))
    _, patched, encoder = with_encoder("bert")
    patched.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="which runs its own forward, because"):
        encoder(packed(padded_batch("bert")))
