"""patch on every family's encoder: in training, with LoRA, and against float64."""

import copy
import warnings

import pytest
import torch

import fastenc
from fastenc.models import Encoder
from fastenc.nn import stack
from tests.helpers.checkpoints import save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import BY_NAME, ENCODERS, dropouts, model, padded_batch
from tests.helpers.patching import assert_same_gradients

pytestmark = needs_cpp
EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)


def loss(model, batch):
    weight = torch.linspace(-1, 1, 32) * batch["attention_mask"][..., None]
    return (model(**batch).last_hidden_state * weight).sum()


def assert_same_training(ours, theirs, batch):
    """The same loss and gradients, and no warning, because a warning would mean that the fused forward does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b = loss(ours, batch), loss(theirs, batch)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    a.backward(), b.backward()
    assert_same_gradients(ours, theirs)


@EVERY_ENCODER
def test_float32_is_as_near_to_float64_as_the_models_own(family):
    theirs, batch = model(family), padded_batch(family)
    mask = batch["attention_mask"].bool()
    ours, exact = fastenc.patch(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
    with torch.no_grad():
        fused, plain, wanted = (m(**batch).last_hidden_state[mask] for m in (ours, theirs, exact))
    assert (fused - wanted).abs().max() <= 4 * (plain - wanted).abs().max() + 1e-6


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "embedding_gemma2"])
def test_padding_on_the_left_in_training(family):
    """As their tokenizers pad."""
    theirs, batch = model(family), padded_batch(family)
    batch = {name: value.flip(1) for name, value in batch.items()}
    assert_same_training(fastenc.patch(copy.deepcopy(theirs)), theirs, batch)


@EVERY_ENCODER
def test_a_live_model_is_described_as_a_loaded_one(family, tmp_path):
    """So it takes the same kernels."""
    theirs = model(family)
    loaded = Encoder.from_pretrained(save(theirs, tmp_path))
    live = fastenc.encoder_of(fastenc.patch(theirs)).live
    assert live.embeddings == loaded.embeddings.spec
    assert live.stack == loaded.stack


@EVERY_ENCODER
def test_lora_of_peft(family):
    peft = pytest.importorskip("peft")
    linears = BY_NAME[family].linears
    names = [linears[n] for n in ("query", "value", "qkv", "attention_out", "down") if n in linears]
    torch.manual_seed(0)
    theirs = peft.get_peft_model(
        model(family), peft.LoraConfig(r=3, target_modules=names, init_lora_weights=False)
    ).eval()
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    assert_same_training(ours, theirs, batch)


@EVERY_ENCODER
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_training_without_dropout(family, checkpointing, monkeypatch):
    recomputed = []
    checkpoint = stack.checkpoint
    counted = lambda *arguments, **options: (
        recomputed.append(1),
        checkpoint(*arguments, **options),
    )[1]
    monkeypatch.setattr(stack, "checkpoint", counted)
    theirs = model(family, **dropouts(family)).train()
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    if checkpointing and not ours.supports_gradient_checkpointing:
        checkpointing = False
    if checkpointing:
        ours.gradient_checkpointing_enable()
    assert_same_training(ours, theirs, batch)
    assert bool(recomputed) == checkpointing
