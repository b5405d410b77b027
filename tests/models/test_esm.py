"""What is ESM's alone: rotary frequencies in the file, scaling for masked tokens, and the head for contacts."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastenc
from fastenc.models import Encoder
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch

FREQUENCIES = "rotary_embeddings.inv_freq"


@needs_cpp
def test_the_files_frequencies_count(tmp_path):
    """Older files have those that training had, rounded to float16, in every layer."""
    theirs, batch = model("esm"), padded_batch("esm")
    rounded = theirs.rotary_embeddings.inv_freq.half().float() * 1.5
    theirs.rotary_embeddings.inv_freq.copy_(rounded)
    file = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith(FREQUENCIES))
    value = tensors.pop(key)
    older = {f"encoder.layer.{i}.attention.self.{FREQUENCIES}": value.clone() for i in range(2)}
    save_file(tensors | older, file)
    ours, patched = Encoder.from_pretrained(tmp_path), fastenc.patch(copy.deepcopy(theirs))
    ours.save_pretrained(tmp_path / "saved")
    again = type(theirs).from_pretrained(tmp_path / "saved").eval()
    mask = batch["attention_mask"].bool()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = theirs(**batch).last_hidden_state[mask]
        close(ours(packed(batch)).last_hidden_state, wanted)
        for m in (patched, again):
            close(m(**batch).last_hidden_state[mask], wanted)
    patched.rotary_embeddings.inv_freq.mul_(2)
    with pytest.warns(UserWarning, match="inv_freq of rotary_embeddings was changed"):
        patched(**batch)


@needs_cpp
def test_masked_tokens_and_vectors_in_their_place():
    theirs, batch = model("esm"), padded_batch("esm")
    batch["input_ids"][0, 1:4] = theirs.config.mask_token_id  # 3 of 5
    patched, mask = fastenc.patch(copy.deepcopy(theirs)), batch["attention_mask"].bool()
    vectors = {"attention_mask": batch["attention_mask"], "inputs_embeds": torch.randn(4, 30, 32)}
    with torch.no_grad():
        close(patched(**batch).last_hidden_state[mask], theirs(**batch).last_hidden_state[mask])
        with pytest.warns(UserWarning, match="called with inputs_embeds"):
            output = patched(**vectors)
        close(output.last_hidden_state, theirs(**vectors).last_hidden_state)


def test_a_file_without_the_head_for_contacts(tmp_path):
    theirs = model("esm")
    file = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith(FREQUENCIES))
    save_file({k: v for k, v in tensors.items() if not k.startswith("contact_head")}, file)
    batch = padded_batch("esm")
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
        close(Encoder.from_pretrained(tmp_path)(packed(batch)).last_hidden_state, expected)
    save_file(tensors | {key: torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"inv_freq has shape \(3,\), but config.json asks for"):
        Encoder.from_pretrained(tmp_path)
