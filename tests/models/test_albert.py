"""ALBERT's traps."""

import copy

import torch

import fastenc
from fastenc.models import Encoder
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.patching import assert_same_gradients, assert_same_outputs


@needs_cpp
def test_a_projection_between_equal_widths(tmp_path):
    """Other families project embeddings of another width only."""
    theirs = model("albert", embedding_size=32)
    ours = Encoder.from_pretrained(save(theirs, tmp_path / "theirs"))
    batch = padded_batch("albert")
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        close(ours(packed(batch)).last_hidden_state, theirs(**batch).last_hidden_state[mask])
    ours.save_pretrained(tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items())
    patched = fastenc.patch(copy.deepcopy(theirs))
    assert_same_outputs(patched(**batch), theirs(**batch), mask)
    for m in (patched, theirs):
        (m(**batch).last_hidden_state * mask[..., None]).square().sum().backward()
    assert_same_gradients(patched, theirs)
