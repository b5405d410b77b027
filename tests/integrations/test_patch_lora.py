"""PEFT's LoRA on patched models computes the same numbers, and stays fused."""

import copy
import warnings

import pytest
import torch

import fastenc
from fastenc.ops.int8_products import has_int8_products
from tests.helpers.adaptations import disturb
from tests.helpers.extension import needs_cpp
from tests.helpers.families import BY_NAME, FAMILIES, model, padded_batch
from tests.helpers.patching import assert_same_gradients, assert_same_outputs

peft = pytest.importorskip("peft")
pytestmark = needs_cpp
needs_int8 = pytest.mark.skipif(
    not has_int8_products(), reason="this processor does not multiply 8 bits"
)


def with_lora(family="bert", targets=("query", "value"), **options):
    linears = BY_NAME[family].linears
    names = [linears[target] for target in targets if target in linears] or [linears["qkv"]]
    settings = peft.LoraConfig(
        task_type="SEQ_CLS", r=3, lora_alpha=5, target_modules=names, **options
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model(family, "ForSequenceClassification"), settings)
    disturb(wrapped)
    return wrapped.eval()


def agree(ours, theirs, batch):
    """Outputs and every gradient agree without a warning, and padding is 0, as only a fused encoder leaves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels = torch.tensor([0, 1, 1, 0])
        output, expected = ours(**batch, labels=labels), theirs(**batch, labels=labels)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
        output.loss.backward(), expected.loss.backward()
        assert_same_gradients(ours, theirs)
        hidden = ours.get_base_model().base_model(**batch).last_hidden_state
        assert not hidden[batch["attention_mask"] == 0].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "targets", [("query", "value"), ("attention_out", "up", "down")], ids=["qv", "rest"]
)
@pytest.mark.parametrize("patched", ["before", "after"])
def test_outputs_and_every_gradient_agree(family, targets, patched):
    theirs = with_lora(family, targets)
    batch = padded_batch(family)
    if patched == "after":
        ours = fastenc.patch(copy.deepcopy(theirs))
    else:
        plain = fastenc.patch(model(family, "ForSequenceClassification"))
        settings = theirs.peft_config["default"]
        ours = peft.get_peft_model(plain, copy.deepcopy(settings)).eval()
        ours.load_state_dict(theirs.state_dict(), strict=False)
    agree(ours, theirs, batch)


def test_switches_of_adapters():
    """Disabled, merged, scaled, or another adapter: every call computes what PEFT computes."""
    theirs = with_lora()
    theirs.add_adapter("other", peft.LoraConfig(r=2, target_modules=["key"], lora_alpha=8))
    disturb(theirs)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert")
    same = lambda: assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        warnings.filterwarnings("ignore", message="Already unmerged")
        same()
        with ours.disable_adapter(), theirs.disable_adapter():
            same()
        for m in (ours, theirs):
            m.set_adapter("other")
        same()
        for m in (ours, theirs):
            m.set_adapter("default")
            m.base_model.merge_adapter()
        same()
        for m in (ours, theirs):
            m.base_model.unmerge_adapter()
            for module in m.modules():
                if hasattr(module, "lora_A"):
                    module.scale_layer(2.0)
        same()


@torch.no_grad()
def test_a_merged_adapter_can_be_disabled():
    """PEFT subtracts it in the first call."""
    theirs, batch = with_lora(), padded_batch("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    fastenc.freeze(ours.merge_adapter() or ours)
    with pytest.warns(UserWarning, match="the LoRA of .*query is merged and disabled"):
        for _ in range(2):
            with ours.disable_adapter(), theirs.disable_adapter():
                assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
    assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def replaced_linear(m):
    torch.manual_seed(3)
    m.get_base_model().bert.encoder.layer[1].output.dense = torch.nn.Linear(48, 32)


# What changes the weights that a frozen model multiplies with.
WEIGHT_CHANGES = {
    "merge": lambda m: m.merge_adapter(),
    "merge and unload": lambda m: m.merge_and_unload(),
    "another linear layer": replaced_linear,
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES)
@torch.no_grad()
def test_merging_and_replacing_end_freeze(change):
    theirs, batch = with_lora(), padded_batch("bert", (30,) * 8)
    ours = fastenc.freeze(fastenc.patch(copy.deepcopy(theirs)))
    same = lambda: torch.testing.assert_close(
        ours(**batch).logits, theirs(**batch).logits, rtol=0, atol=2e-5
    )
    same()
    ours.set_adapter("default")
    same()
    frozen = ours.get_base_model().bert.fastenc_frozen
    assert frozen._copies is not None
    change(ours), change(theirs)
    same()
    assert frozen._copies is None


@needs_int8
@pytest.mark.parametrize(
    "options, layer",
    [
        ({}, 0),
        ({"lora_bias": True}, 0),
        ({"use_dora": True}, 0),
        ({"layers_to_transform": [1]}, 1),
    ],
)
@torch.no_grad()
def test_int8_takes_merged_lora_alone(options, layer):
    theirs, batch = with_lora(**options), padded_batch("bert")
    exact = theirs(**batch).logits
    ours = fastenc.patch(copy.deepcopy(theirs))
    with pytest.raises(ValueError, match=f"layer {layer} .*must be merged into its weights first"):
        fastenc.freeze(ours, dtype="int8")
    torch.testing.assert_close(ours(**batch).logits, exact, rtol=0, atol=1e-5)

    ours.base_model.merge_adapter()
    in_place = fastenc.freeze(ours, dtype="int8")(**batch).logits
    unloaded = fastenc.patch(copy.deepcopy(theirs)).merge_and_unload()
    in_new_modules = fastenc.freeze(unloaded, dtype="int8")(**batch).logits
    assert torch.equal(in_place, in_new_modules) and not torch.equal(in_place, exact)
    torch.testing.assert_close(in_place, exact, rtol=0, atol=0.05)
    with theirs.disable_adapter():  # far from the model without LoRA
        assert (theirs(**batch).logits - exact).abs().max() > 0.5

    ours.base_model.unmerge_adapter()  # LoRA is computed apart again, and these layers in float32
    apart = ours(**batch).logits
    assert not torch.equal(apart, in_place)
    fastenc.unfreeze(ours)
    torch.testing.assert_close(apart, exact, rtol=0, atol=0.05 if layer else 1e-5)
    torch.testing.assert_close(ours(**batch).logits, exact, rtol=0, atol=1e-5)


def test_dropout_of_lora_is_applied_in_training():
    ours = fastenc.patch(with_lora(lora_dropout=0.5))
    batch = padded_batch("bert")
    for module in ours.modules():
        if isinstance(module, torch.nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours.train()(**batch).logits)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants(options):
    theirs = with_lora(**options)
    agree(fastenc.patch(copy.deepcopy(theirs)), theirs, padded_batch("bert"))


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_dora_in_training(family):
    """The dropout drops nothing. With it, PEFT computes the product with the weight a second time."""
    theirs = with_lora(family, ("query", "value", "up", "down"), use_dora=True, lora_dropout=0.5)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    theirs.train()
    agree(fastenc.patch(copy.deepcopy(theirs)), theirs, padded_batch(family))


def test_switches_of_dora():
    """Disabled, merged, or two at a time, which only PEFT computes."""
    theirs, batch = with_lora(use_dora=True), padded_batch("bert")
    theirs.add_adapter("other", peft.LoraConfig(r=2, target_modules=["query"], use_dora=True))
    disturb(theirs)
    ours = fastenc.patch(copy.deepcopy(theirs))
    same = lambda: assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        same()
        with ours.disable_adapter(), theirs.disable_adapter():
            same()
        for m in (ours, theirs):
            m.base_model.merge_adapter()
        same()
        for m in (ours, theirs):
            m.base_model.unmerge_adapter()
            for module in m.modules():
                if hasattr(module, "lora_A"):
                    module.set_adapter(["default", "other"])
        if has_int8_products():
            with pytest.raises(ValueError, match=r"LoRA of .*query is a variant .*: undo that, or"):
                fastenc.freeze(ours, dtype="int8")
        with pytest.warns(UserWarning, match=r"the LoRA of .*query is a variant \(DoraLinear"):
            same()


def test_gradient_checkpointing_with_a_frozen_model():
    theirs = with_lora()
    ours = fastenc.patch(copy.deepcopy(theirs))
    for m in (ours, theirs):
        m.gradient_checkpointing_enable() if hasattr(m, "gradient_checkpointing_enable") else None
        m.enable_input_require_grads()
        for module in m.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        m.train()
    batch, labels = padded_batch("bert"), torch.tensor([0, 1, 1, 0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        for m in (ours, theirs):
            m(**batch, labels=labels).loss.backward()
    assert_same_gradients(ours, theirs)
