"""EmbeddingGemma 2: what no other family has, beside transformers."""

import copy
import json
import warnings

import pytest
import torch
import transformers

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.ops import int8_products
from tests.helpers.byte_tokenizers import byte_tokenizer
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import config, model, padded_batch

FAMILY = "embedding_gemma2"
# Scores are not divided by the root of the heads' width, so rounding grows with every layer.
ROUNDING = 1e-4
SIZES = dict(embedding_dim=48, layer_types=["sliding_attention"] * 3 + ["full_attention"])


def scaled(**changes):
    """A model whose layers have factors, as trained ones do."""
    theirs = model(FAMILY, num_hidden_layers=4, **SIZES, **changes)
    with torch.no_grad():
        for number, layer in enumerate(theirs.layers):
            layer.layer_scalar.fill_(0.5 + 0.3 * number)
    return theirs


def multimodal(vision=None):
    """The multimodal model, which takes texts, images and sounds."""
    text = scaled()
    tokens = dict(image_token_id=2, video_token_id=3, audio_token_id=4)  # no text has them
    described = transformers.EmbeddingGemma2Config(
        text_config=text.config, vision_config=vision, audio_config=None, **tokens
    )
    result = transformers.EmbeddingGemma2Model(described).eval()
    result.language_model.load_state_dict(text.state_dict())
    return result


def real(output, batch):
    return output.last_hidden_state[batch["attention_mask"].bool()]


def without_warning(call):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        return call()


def test_factors_of_layers_are_loaded_and_saved(tmp_path):
    theirs, batch = scaled(), padded_batch(FAMILY)
    ours = Encoder.from_pretrained(save(theirs, tmp_path / "theirs"))
    with torch.no_grad():
        close(ours(packed(batch)).last_hidden_state, real(theirs(**batch), batch), atol=ROUNDING)
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModel.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@needs_cpp
@pytest.mark.parametrize("freezes", [False, True], ids=["", "frozen"])
def test_factors_of_a_patched_model_are_read_in_every_call(freezes):
    theirs, batch = scaled(), padded_batch(FAMILY)
    ours = fastenc.patch(copy.deepcopy(theirs))
    for factor in (0.5, 2.0):
        for each in (ours, theirs):
            each.layers[1].layer_scalar.fill_(factor)
        if freezes:
            fastenc.freeze(ours)
        states = without_warning(lambda: real(ours(**batch), batch))
        with torch.no_grad():
            close(states, real(theirs(**batch), batch), atol=ROUNDING)


@needs_cpp
def test_texts_in_the_multimodal_model_are_fused():
    theirs, batch = multimodal(), padded_batch(FAMILY)
    ours = fastenc.patch(copy.deepcopy(theirs))
    output = without_warning(lambda: ours(**batch, output_hidden_states=True))
    with torch.no_grad():
        expected = theirs(**batch, output_hidden_states=True)
    assert type(output) is type(expected)
    close(real(output, batch), real(expected, batch), atol=ROUNDING)
    mask = batch["attention_mask"].bool()
    for a, b in zip(output.hidden_states, expected.hidden_states, strict=True):
        close(a[mask], b[mask], atol=ROUNDING)


@needs_cpp
def test_a_text_with_an_image_is_fused():
    side, pixels = 4, 4  # patches and pixels of a side
    vision = transformers.AutoConfig.for_model(
        "gemma4_vision",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=pixels,
        pooling_kernel_size=2,
        position_embedding_size=64,
    )
    theirs, batch = multimodal(vision), padded_batch(FAMILY)
    batch["input_ids"][1, 2:6] = theirs.config.image_token_id
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
    batch |= {"image_position_ids": positions[None]}
    batch |= {"pixel_values": torch.rand(1, side**2, 3 * pixels**2)}
    with pytest.warns(UserWarning, match="Gemma4VisionModel in EmbeddingGemma2Model is not"):
        ours = fastenc.patch(copy.deepcopy(theirs))
    states = without_warning(lambda: real(ours(**batch), batch))
    with torch.no_grad():
        close(states, real(theirs(**batch), batch), atol=ROUNDING)


def test_an_encoder_loads_the_text_model_of_the_multimodal_one(tmp_path):
    theirs, batch = multimodal(), padded_batch(FAMILY)
    ours = Encoder.from_pretrained(save(theirs, tmp_path / "multimodal"))
    with torch.no_grad():
        close(ours(packed(batch)).last_hidden_state, real(theirs(**batch), batch), atol=ROUNDING)
    ours.save_pretrained(tmp_path / "text")
    again = transformers.AutoModel.from_pretrained(tmp_path / "text")
    assert type(again).__name__ == "EmbeddingGemma2TextModel"


def test_vectors_have_the_width_of_the_output_and_words_that_of_the_states(tmp_path):
    texts = ["A short text.", "And a longer one of several words."]
    ours = Encoder.from_pretrained(save(scaled(vocab_size=400), tmp_path / "base"))
    ours.tokenizer = byte_tokenizer("gemma3", texts)
    assert (ours.config.hidden_size, ours.config.output_size) == (32, 48)
    vectors = {pooling: ours.encode(texts, pooling=pooling) for pooling in ("mean", "last-four")}
    assert {each.shape for each in vectors.values()} == {(2, 48)}
    states = ours.embed_words([text.split() for text in texts], layers=[-1]).vectors
    assert states.shape == (10, 32)
    assert ours.project_output(states).shape == (10, 48)
    ours.save_pretrained(tmp_path / "saved")
    assert torch.equal(Encoder.from_pretrained(tmp_path / "saved").encode(texts), vectors["mean"])


def test_the_mean_of_four_layers_is_projected(tmp_path):
    theirs, batch = scaled(), padded_batch(FAMILY)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    mask = batch["attention_mask"][..., None].bool()
    with torch.no_grad():
        states = ours(packed(batch), output_hidden_states=True).hidden_states
        means = [ours.project_output(state) for state in states[-4:]]
        rows = torch.stack(means).mean(0).split(mask.sum((1, 2)).tolist())
        expected = torch.stack([each.mean(0) for each in rows])
        close(ours.pooled_vectors(packed(batch), "last-four"), expected)


@pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
def test_loaded_in_8_bits_no_layer_keeps_float32_matrices(tmp_path):
    batch = packed(padded_batch(FAMILY))
    ours = Encoder.from_pretrained(save(scaled(), tmp_path))
    loaded = Encoder.from_pretrained(tmp_path, dtype="int8")
    kept = [name for name, p in loaded.layers.named_parameters() if p.dim() == 2]
    assert not kept
    fastenc.freeze(ours, dtype="int8")
    with torch.inference_mode():
        states = [each(batch).last_hidden_state for each in (ours, loaded)]
    assert torch.equal(*states)


def test_heads_of_layers_without_a_window_have_a_default():
    values = config(FAMILY).to_dict()
    del values["per_layer_config"]
    sliding, full = (
        EncoderConfig.from_hf(values).architecture.stack(EncoderConfig.from_hf(values)).layers
    )
    assert (sliding.attention.head_dim, sliding.attention.key_heads) == (16, 2)
    assert (full.attention.head_dim, full.attention.key_heads) == (512, 1)
    of_transformers = transformers.EmbeddingGemma2TextConfig().per_layer_config[5]
    assert (of_transformers.head_dim, of_transformers.num_key_value_heads) == (512, 1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "per_layer_config must be an object"),
        ({"1": [1]}, "per_layer_config's layer 1 must be an object"),
        ({"1": {"head_dim": "x"}}, "layer 1: head_dim must be a positive integer"),
        ({"1": {"num_key_value_heads": 3}}, "must divide num_attention_heads, got 3 and 4"),
    ],
)
def test_bad_heads_of_layers(layers, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig.from_hf(config(FAMILY).to_dict() | {"per_layer_config": layers})


def test_a_size_of_all_vectors_that_no_tensor_has(tmp_path):
    file = save(model(FAMILY), tmp_path) / "config.json"
    values = json.loads(file.read_text()) | {"hidden_size_per_layer_input": 2**63 - 1}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json describes a model that cannot be built"):
        Encoder.from_pretrained(tmp_path)
