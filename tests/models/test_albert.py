"""What ALBERT does differently from other families."""

import copy
import warnings

import pytest
import torch

import fastenc
from fastenc.models import Encoder
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.patching import assert_same_gradients, assert_same_outputs


@needs_cpp
def test_a_projection_between_equal_widths(tmp_path):
    """Other families project embeddings only if their width differs."""
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


@needs_cpp
@pytest.mark.parametrize("layers, groups, inner", [(2, 4, 1), (2, 3, 2), (1, 2, 1), (4, 3, 1)])
def test_groups_that_no_layer_uses(layers, groups, inner, tmp_path):
    sizes = dict(num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner)
    theirs, batch = model("albert", **sizes), padded_batch("albert")
    mask = batch["attention_mask"].bool()
    ours = Encoder.from_pretrained(save(theirs, tmp_path / "theirs"))
    patched = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = theirs(**batch).last_hidden_state[mask]
        for prepare in (lambda m: m, fastenc.freeze):
            close(prepare(ours)(packed(batch)).last_hidden_state, expected)
            close(prepare(patched)(**batch).last_hidden_state[mask], expected)
    for m in (patched, theirs):
        (m(**batch).last_hidden_state * mask[..., None]).square().sum().backward()
    assert_same_gradients(patched, theirs)
    ours.save_pretrained(tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items())


@needs_cpp
def test_lora_in_groups_that_no_layer_uses():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=3, target_modules=["query", "ffn"], init_lora_weights=False)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(
        model("albert", num_hidden_layers=2, num_hidden_groups=4), options
    ).eval()
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("albert")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
