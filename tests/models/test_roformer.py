"""What RoFormer alone has: a table of angles in its files, a switch that is refused, and words from jieba."""

import copy
import warnings

import pytest
import torch

import fastenc
from fastenc.models import Encoder
from fastenc.models.checkpoint import read_tensors, write_tensors
from fastenc.packing import pack_sequences
from fastenc.text import save_tokenizer
from tests.helpers.checkpoints import save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.training_run import word_tokenizer

pytestmark = needs_cpp
ANGLES = "encoder.embed_positions.weight"


def test_a_rotation_of_values_is_refused(tmp_path):
    theirs = model("roformer", rotary_value=True)
    with pytest.raises(ValueError, match="rotary_value must be False, got True"):
        fastenc.patch(theirs)
    with pytest.raises(ValueError, match="rotary_value must be False, got True"):
        Encoder.from_pretrained(save(theirs, tmp_path))


def test_another_table_of_angles_in_a_file_is_refused(tmp_path):
    folder = save(model("roformer"), tmp_path)
    tensors = read_tensors(folder)
    tensors[ANGLES][3, 1] += 0.01
    write_tensors(folder, tensors)
    with pytest.raises(ValueError, match=f"{ANGLES} must have the values that follow from config"):
        Encoder.from_pretrained(folder)


def test_a_patched_model_with_another_table_runs_its_own_forward():
    theirs, batch = model("roformer"), padded_batch("roformer")
    ours = fastenc.patch(copy.deepcopy(theirs))
    angles = dict(ours.named_parameters())[ANGLES]
    with torch.no_grad():
        ours(**batch)
        angles.data[:, 0] += 0.5  # raises no version counter
        with pytest.warns(UserWarning, match="a table that follows from its configuration"):
            changed = ours(**batch).last_hidden_state
        angles[:, 0] -= 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = ours(**batch).last_hidden_state
        mask = batch["attention_mask"].bool()
        wanted = theirs(**batch).last_hidden_state[mask]
    torch.testing.assert_close(again[mask], wanted, rtol=1e-4, atol=1e-4)
    assert (changed[mask] - wanted).abs().max() > 1e-3


def test_angles_of_far_positions_are_those_of_the_file(tmp_path):
    """In float32 the angles of position 1,500 would be off by 1e-4."""
    theirs = model("roformer", max_position_embeddings=1536)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    ours.save_pretrained(tmp_path / "ours")
    stored = read_tensors(tmp_path / "ours")[ANGLES]
    wanted = theirs.state_dict()[ANGLES]
    torch.testing.assert_close(stored, wanted, rtol=0, atol=2e-7)
    with pytest.raises(ValueError, match="at most 1536 tokens"):
        ours(pack_sequences([[5] * 1537]))


def test_its_own_tokenizer_is_not_read(tmp_path):
    """The file lacks the split into words, so that its tokens would be others."""
    folder = save(model("roformer"), tmp_path)
    save_tokenizer(word_tokenizer(), folder)
    assert Encoder.from_pretrained(folder).tokenizer is not None
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "RoFormerTokenizer"}')
    with pytest.warns(UserWarning, match="lacks the split into words by jieba"):
        assert Encoder.from_pretrained(folder).tokenizer is None
