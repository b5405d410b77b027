"""T5, BART and their kin: the encoder of a model that has a decoder too."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastenc
from fastenc.models import (
    Encoder,
    MaskedLM,
    QuestionAnswerer,
    Seq2Seq,
    SequenceClassifier,
    TokenClassifier,
)
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import model, padded_batch, whole

WITH_DECODER = pytest.mark.parametrize(
    "family", ["t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100"]
)


@WITH_DECODER
def test_the_encoder_of_a_whole_checkpoint(family, tmp_path):
    theirs = model(family, "ForConditionalGeneration")
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    batch = padded_batch(family)
    with torch.no_grad():
        expected = theirs.get_encoder()(**batch).last_hidden_state
        close(ours(packed(batch)).last_hidden_state, expected[batch["attention_mask"].bool()])


@WITH_DECODER
def test_what_is_written_is_what_was_read(family, tmp_path):
    theirs = model(family)
    Encoder.from_pretrained(save(theirs, tmp_path / "a")).save_pretrained(tmp_path / "b")
    again = type(theirs).from_pretrained(tmp_path / "b").state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(again[name], value), name


@WITH_DECODER
@pytest.mark.parametrize("head", [MaskedLM, SequenceClassifier, TokenClassifier, QuestionAnswerer])
def test_there_are_no_heads(family, head, tmp_path):
    folder = save(model(family), tmp_path)
    with pytest.raises(ValueError, match=f"got {family}: take a model of another family"):
        head.from_pretrained(folder)


FIXED_POSITIONS = {"marian": "weight", "pegasus": "weight", "m2m_100": "weights"}


@pytest.mark.parametrize("family", FIXED_POSITIONS)
def test_fixed_positions_are_transformers_and_not_trained(family, tmp_path):
    theirs = model(family)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    table = getattr(theirs.embed_positions, FIXED_POSITIONS[family])
    assert torch.equal(ours.embeddings.position.weight, table)
    assert not any("position" in name for name in ours.state_dict())


@pytest.mark.parametrize("family", ["marian", "pegasus"])
@pytest.mark.parametrize("loaded", [Encoder, Seq2Seq])
def test_another_position_table_is_refused(family, loaded, tmp_path):
    folder = save(whole(family), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.encoder.embed_positions.weight"
    tensors[name] = torch.ones(40, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = "embed_positions.weight must have the values that follow from config.json"
    with pytest.raises(ValueError, match=message):
        loaded.from_pretrained(folder)


def test_the_position_tables_of_older_files_are_not_read(tmp_path):
    theirs = whole("m2m_100")
    folder = save(theirs, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for part in ("encoder", "decoder"):
        tensors[f"model.{part}.embed_positions.weights"] = torch.ones(42, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ours, batch = Seq2Seq.from_pretrained(folder), padded_batch("m2m_100")
    with torch.no_grad():
        expected = theirs.get_encoder()(**batch).last_hidden_state
        close(
            ours.encoder(packed(batch)).last_hidden_state, expected[batch["attention_mask"].bool()]
        )


def test_a_marian_with_two_vocabularies_is_refused(tmp_path):
    folder = save(model("marian", share_encoder_decoder_embeddings=False), tmp_path)
    with pytest.raises(
        ValueError, match="share_encoder_decoder_embeddings must be True, got False"
    ):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("family", ["bart", "m2m_100"])
def test_layers_are_skipped_in_training_by_transformers_alone(family, part, tmp_path):
    layerdrop = f"{part}_layerdrop"
    theirs = whole(family, **{layerdrop: 0.1})
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path / "a"))
    ours.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())[layerdrop] == 0.1
    batch = padded_batch(family)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = theirs(**batch).loss
    patched = fastenc.patch(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(patched.eval()(**batch).loss, expected)
    with pytest.warns(UserWarning, match="takes its own forward, because it skips layers in train"):
        patched.train()(**batch).loss.backward()
