"""What ends a freeze in 8 bits, and what a model says that has no other weights."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastenc
from fastenc.adapt import Lora, PromptTuning, add_adaptation, load_adaptation
from fastenc.models import Encoder, SequenceClassifier
from fastenc.ops import int8_products
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import model, padded_batch

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
BATCH = padded_batch("bert")
HEAD = "ForSequenceClassification"


def call(m):
    """The states of tokens, or the logits, of a model of ours or of transformers."""
    if isinstance(m, Encoder):
        return m(packed(BATCH)).last_hidden_state
    if isinstance(m, SequenceClassifier):
        return m(packed(BATCH)).logits
    output = m(**BATCH)
    return output.logits if "logits" in output else output[0][BATCH["attention_mask"].bool()]


@torch.no_grad()
def result(m):
    return call(m)


@torch.no_grad()
def halve_queries(m):
    """Of all layers, and keys and values."""
    for name, parameter in m.named_parameters():
        if name.endswith(("query.weight", "key.weight", "value.weight", "qkv.weight")):
            parameter.mul_(0.5)


# A model of transformers, and the model in 8 bits that computes the same.
FORMS = {
    "own": ("Model", lambda theirs, folder: Encoder.from_pretrained(save(theirs, folder))),
    "own with a head": (
        HEAD,
        lambda theirs, folder: SequenceClassifier.from_pretrained(save(theirs, folder)),
    ),
    "patched": ("Model", lambda theirs, folder: fastenc.patch(copy.deepcopy(theirs))),
    "patched with a head": (HEAD, lambda theirs, folder: fastenc.patch(copy.deepcopy(theirs))),
}


@pytest.fixture(params=FORMS)
def frozen(request, tmp_path):
    """``theirs`` in float32, ``ours`` in 8 bits, and its result."""
    task, make = FORMS[request.param]
    theirs = model("bert", task)
    ours = fastenc.freeze(make(theirs, tmp_path), dtype="int8")
    in_8_bits = result(ours)
    assert not torch.equal(in_8_bits, result(theirs))
    return SimpleNamespace(theirs=theirs, ours=ours, in_8_bits=in_8_bits)


ENDS = {
    "train": lambda m: m.train().eval(),
    "a call with gradients": call,
    "to a device": lambda m: m.to("cpu"),
    "to a dtype": lambda m: m.to(torch.float64).to(torch.float32),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "unfreeze": fastenc.unfreeze,
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_freeze_ends_it(name, frozen):
    for m in (frozen.ours, frozen.theirs):
        halve_queries(m)
    assert torch.equal(result(frozen.ours), frozen.in_8_bits)  # it does not see them
    ENDS[name](frozen.ours)
    close(result(frozen.ours), result(frozen.theirs))


def test_what_changes_no_weight_does_not_end_it(frozen, tmp_path):
    ours = frozen.ours
    ours.eval().requires_grad_(False).requires_grad_(True)
    ours.state_dict()
    ours.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"must be .int8. or None, got 'int4'"):
        fastenc.freeze(ours, dtype="int4")
    assert torch.equal(result(ours), frozen.in_8_bits)
    # What is saved is float32.
    again = type(frozen.theirs).from_pretrained(tmp_path / "saved")
    close(result(again), result(frozen.theirs), atol=0)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),  # what a pool of processes gets
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_not_frozen(name, frozen):
    copied = COPIES[name](frozen.ours)
    close(result(copied), result(frozen.theirs))
    assert torch.equal(result(frozen.ours), frozen.in_8_bits)
    assert torch.equal(result(fastenc.freeze(copied, dtype="int8")), frozen.in_8_bits)


@pytest.fixture(params=[Encoder, SequenceClassifier])
def loaded(request, tmp_path):
    """A model in 8 bits without other weights. Its checkpoint's folder has an adaptation in "lora"."""
    made = model("bert", "Model" if request.param is Encoder else HEAD)
    plain = request.param.from_pretrained(save(made, tmp_path))
    add_adaptation(plain, Lora(rank=2))
    plain.save_pretrained(tmp_path / "lora")
    return request.param.from_pretrained(tmp_path, dtype="int8")


def in_autocast(m):
    with torch.autocast("cpu", torch.bfloat16):
        result(m)


def with_dropout(m):
    layers = getattr(m, "encoder", m).layers.train()
    try:
        result(m)
    finally:
        layers.eval()


def other_weights(m):
    changed = type(m)(m.config)
    return {name: torch.ones_like(value) for name, value in changed.state_dict().items()}


REFUSED = {
    "train": lambda m: m.train(),
    "train the encoder": lambda m: getattr(m, "encoder", m).train(),
    "a call with gradients": call,
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "to a device": lambda m: m.to("meta"),
    "unfreeze": fastenc.unfreeze,
    "freeze": fastenc.freeze,
    "freeze again": lambda m: fastenc.freeze(m, dtype="int8"),
    "state_dict": lambda m: m.state_dict(),
    "save_pretrained": lambda m: m.save_pretrained(Path(m.base, "saved")),
    "load_state_dict": lambda m: m.load_state_dict(other_weights(m)),
    "load some": lambda m: m.load_state_dict(other_weights(m), strict=False),
    "autocast": in_autocast,
    "dropout": with_dropout,
    "LoRA": lambda m: add_adaptation(m, Lora(rank=2)),
    "a prompt": lambda m: add_adaptation(m, PromptTuning(2)),
    "LoRA of a folder": lambda m: load_adaptation(m, Path(m.base, "lora")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_without_float32_weights_it_says_how_to_load(name, loaded):
    before = result(loaded)
    with pytest.raises(ValueError, match=r"loaded with dtype=.int8.* load it without dtype"):
        REFUSED[name](loaded)
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(result(loaded), before)
    assert not Path(loaded.base, "saved").exists()


def test_without_float32_weights_it_may_be_told_what_it_is(loaded):
    before = result(loaded)
    assert torch.equal(result(loaded.to("cpu").float().eval()), before)


@pytest.mark.parametrize("name", COPIES)
def test_without_float32_weights_copies_compute_the_same(name, loaded):
    copied = COPIES[name](loaded)
    assert torch.equal(result(copied), result(loaded))
    with pytest.raises(ValueError, match="load it without dtype"):
        copied.train()
