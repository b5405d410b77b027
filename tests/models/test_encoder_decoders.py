"""T5 and BART: the encoder of a model that has a decoder too."""

import json

import pytest
import torch

import fastenc
from fastenc.models import Encoder, MaskedLM, QuestionAnswerer, SequenceClassifier, TokenClassifier
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import model, padded_batch

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


@pytest.mark.parametrize("family", ["bart", "mbart"])
def test_layers_that_training_skips_are_refused(family, tmp_path):
    folder = save(model(family), tmp_path)
    values = json.loads((folder / "config.json").read_text()) | {"encoder_layerdrop": 0.1}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"encoder_layerdrop must be 0, .* got 0.1: set it to 0"):
        Encoder.from_pretrained(folder)
    with pytest.raises(ValueError, match="encoder_layerdrop must be 0"):
        fastenc.patch(model(family, encoder_layerdrop=0.1))
