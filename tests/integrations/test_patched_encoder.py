"""encoder_of: what an Encoder computes, computed over a patched model, beside the model itself and its checkpoint."""

import copy

import pytest
import torch

import fastenc
import fastenc.adapt
from fastenc.analysis import summarize_heads
from fastenc.nn.stack import StackSpec
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, model, padded_batch
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
    for ours, visited, state in zip(output.hidden_states, seen, expected, strict=True):
        torch.testing.assert_close(ours, state[mask], rtol=1e-4, atol=1e-4)
        assert torch.equal(ours, visited[1])


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
        assert encoder.frozen.current(encoder) is not None
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


def test_what_it_cannot_take():
    with pytest.raises(ValueError, match=r"call fastenc.patch\(model\) first"):
        fastenc.encoder_of(model("bert"))
    _, patched, encoder = with_encoder("bert")
    with pytest.raises(ValueError, match="a patched model takes PEFT's LoRA"):
        fastenc.adapt.add_adaptation(encoder, fastenc.adapt.Lora())
    patched.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="which runs its own forward, because"):
        encoder(packed(padded_batch("bert")))
