"""Patched models that accelerate prepares and unwraps."""

import copy
import inspect

import pytest
import torch

import fastenc
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.patching import assert_same_outputs

pytest.importorskip("accelerate")
pytestmark = needs_cpp


@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_unwrapping_without_the_wrapper_of_mixed_precision(accelerator, task):
    theirs, batch = model("bert", task), padded_batch("bert")
    ours = accelerator.prepare(fastenc.patch(copy.deepcopy(theirs)))
    with torch.no_grad():
        rounded = ours(**batch)[0]
        unwrapped = accelerator.unwrap_model(ours, keep_fp32_wrapper=False)
        exact = unwrapped(**batch)
        assert not torch.equal(exact[0], rounded)
        assert_same_outputs(exact, theirs(**batch), batch["attention_mask"])
        copied = copy.deepcopy(unwrapped)
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(**batch)[0].any()
        assert_same_outputs(unwrapped(**batch), theirs(**batch), batch["attention_mask"])
    assert "forward" not in vars(fastenc.unpatch(unwrapped))


@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_a_copy_of_a_prepared_model_has_weights_of_its_own(accelerator, task):
    theirs, batch = model("bert", task), padded_batch("bert")
    ours = accelerator.prepare(fastenc.patch(copy.deepcopy(theirs)))
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        before = ours(**batch)[0]
        assert torch.equal(copied(**batch)[0], before)
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(**batch)[0].any()
        assert torch.equal(ours(**batch)[0], before)


def test_a_prepared_model_that_is_patched_again(accelerator):
    """accelerate's wrapper of the first patch's forward is then the forward before the second."""
    theirs, batch = model("bert"), padded_batch("bert")
    prepared = accelerator.prepare(fastenc.patch(copy.deepcopy(theirs)))
    again = fastenc.patch(fastenc.unpatch(prepared))
    with pytest.warns(UserWarning, match="its forward was replaced"), torch.no_grad():
        ours = again(**batch)
    with torch.no_grad():
        expected = accelerator.prepare(theirs)(**batch)
    assert torch.equal(ours.last_hidden_state, expected.last_hidden_state)


def test_the_signature_after_unwrapping(accelerator):
    """The Trainer drops the columns that the signature does not name."""
    theirs = model("bert")
    prepared = accelerator.prepare(fastenc.patch(copy.deepcopy(theirs)))
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert inspect.signature(unwrapped.forward) == inspect.signature(theirs.forward)


def test_a_model_that_was_unwrapped_is_fused(accelerator):
    theirs, batch = model("bert"), padded_batch("bert")
    prepared = accelerator.prepare(copy.deepcopy(theirs))
    ours = fastenc.patch(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
    with torch.no_grad():
        output = ours(**batch)
        assert_same_outputs(output, theirs(**batch), batch["attention_mask"])
    assert not output.last_hidden_state[batch["attention_mask"] == 0].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_on_the_disk(tmp_path, frozen):
    from accelerate import disk_offload

    theirs, batch = model("bert"), padded_batch("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    if frozen:
        fastenc.freeze(ours)
    disk_offload(ours, tmp_path, execution_device=torch.device("cpu"))
    with torch.no_grad(), pytest.warns(UserWarning, match="its weights are on the meta device"):
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_an_encoder_whose_weights_are_on_the_disk_says_so(tmp_path):
    from accelerate import disk_offload

    model("bert").save_pretrained(tmp_path)
    encoder = fastenc.Encoder.from_pretrained(tmp_path)
    disk_offload(encoder, tmp_path / "weights", execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="must be in memory, got weights on the meta device"):
        encoder(fastenc.packing.pack(**padded_batch("bert")))
