"""Calls in which padding is computed like tokens that nobody sees: its states are read, or its positions count."""

import copy
import re
import warnings

import pytest
import torch

import fastenc
from tests.helpers.checkpoints import close
from tests.helpers.extension import needs_cpp
from tests.helpers.families import (
    ANSWERERS,
    ENCODERS,
    OTHER_HEADS,
    dropouts,
    model,
    padded_batch,
)
from tests.helpers.patching import assert_same_gradients

pytestmark = needs_cpp
# Windows, relative positions, blocks or global tokens; ESM multiplies embeddings by the mask. Qwen3, Gemma 3 and
# EmbeddingGemma 2 are packed with padding on the left.
OTHERS = (
    "modernbert",
    "deberta",
    "longformer",
    "big_bird-sparse",
    "esm",
    "qwen3",
    "gemma3",
    "embedding_gemma2",
    "ultra",
)
KEEPING = [family for family in ENCODERS if not family.startswith(OTHERS)]


def left(batch):
    return {name: value.flip(1) for name, value in batch.items()}


def with_holes(batch):
    mask = batch["attention_mask"].clone()
    mask[1, 3] = mask[3, 10:14] = 0
    return batch | {"attention_mask": mask}


def expanded(batch):
    """With mask tokens behind the texts, as ColBERT's queries."""
    ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 96)
    return batch | {"input_ids": ids}


def same(ours, theirs, batch, result, trains):
    """The same results without a warning, which would mean transformers' own forward; in training, gradients too."""
    with warnings.catch_warnings(), torch.set_grad_enabled(trains):
        warnings.simplefilter("error")
        # transformers' RemBERT changes the positions of the answers.
        results = [result(each(**copy.deepcopy(batch))) for each in (ours, theirs)]
    close(*results, atol=2e-5)
    if trains:
        for each in results:
            (each * torch.linspace(-1, 1, each.shape[-1])).sum().backward()
        assert_same_gradients(ours, theirs)


state = lambda output: output.last_hidden_state


@pytest.mark.parametrize("family", KEEPING)
@pytest.mark.parametrize("mode", ["inference", "frozen", "training"])
def test_padding_on_the_left(family, mode):
    theirs = model(family)
    ours = fastenc.patch(copy.deepcopy(theirs))
    if mode == "frozen":
        fastenc.freeze(ours)
    same(ours, theirs, left(padded_batch(family)), state, mode == "training")


@pytest.mark.parametrize(
    "family", ["mpnet", "t5", "eurobert", "nomic_bert", "gte", "roformer", "jina_embeddings_v3"]
)
def test_padding_between_tokens_where_distances_count(family):
    theirs, batch = model(family), with_holes(padded_batch(family))
    same(fastenc.patch(copy.deepcopy(theirs)), theirs, batch, state, trains=True)


@pytest.mark.parametrize("family", ["bert", "roberta", "eurobert"])
def test_states_of_masked_tokens(family):
    theirs, batch = model(family), expanded(padded_batch(family))
    same(fastenc.patch(copy.deepcopy(theirs)), theirs, batch, state, trains=False)


@pytest.mark.parametrize("family", [f for f in ANSWERERS if f in KEEPING])
def test_loss_of_answers(family):
    theirs = model(family, "ForQuestionAnswering", **dropouts(family)).train()
    batch = padded_batch(family) | dict(
        start_positions=torch.tensor([1, 4, 0, 9]), end_positions=torch.tensor([3, 4, 0, 28])
    )
    ours = fastenc.patch(copy.deepcopy(theirs))
    same(ours, theirs, batch, lambda output: output.loss[None], trains=True)
    with torch.no_grad():
        close(ours(**batch).start_logits, theirs(**batch).start_logits)


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForTokenClassification"])
def test_loss_of_labelled_padding(task):
    theirs = model("bert", task, **dropouts("bert")).train()
    batch = padded_batch("bert")
    batch["labels"] = torch.ones_like(batch["input_ids"])
    for options in ({}, {"labelled_logits_only": True}) if task == "ForMaskedLM" else ({},):
        ours = fastenc.patch(copy.deepcopy(theirs), **options)
        theirs.zero_grad()
        same(ours, theirs, batch, lambda output: output.loss[None], trains=True)


@pytest.mark.parametrize("layout", [left, with_holes])
@pytest.mark.parametrize("family", OTHER_HEADS["ForCausalLM"])
def test_loss_of_next_tokens(family, layout):
    """A token's label is compared with the logits of the position before, which may be padding."""
    theirs = model(family, "ForCausalLM", **dropouts(family)).train()
    batch = layout(padded_batch(family))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ours, loss = fastenc.patch(copy.deepcopy(theirs)), lambda output: output.loss[None]
    if family not in ("gemma3", "big_bird-sparse"):
        same(ours, theirs, batch, loss, trains=True)
    else:
        with pytest.warns(UserWarning, match="which is padding|before a token|between tokens"):
            result = loss(ours(**batch))
        close(result, loss(theirs(**batch)))


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_classifier_reads_the_row_s_first_position(family):
    """Which is padding if the padding is on the left."""
    theirs, batch = model(family, "ForSequenceClassification"), left(padded_batch(family))
    same(fastenc.patch(copy.deepcopy(theirs)), theirs, batch, lambda output: output.logits, False)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("bert", {}),
        ("modernbert", {}),
        ("esm", {}),
        ("deberta", {}),
        # Attention of content alone, but padding is embedded as 0.
        ("deberta", {"relative_attention": False}),
        ("deberta-v2", {"pos_att_type": [], "conv_kernel_size": 0}),
    ],
)
def test_a_row_without_tokens_and_other_models_take_the_own_forward(family, changes):
    theirs, batch = model(family, **changes), left(padded_batch(family))
    if family == "bert":
        batch["attention_mask"][0] = 0
    ours = fastenc.patch(copy.deepcopy(theirs))
    with pytest.warns(UserWarning, match="a row starts with padding"), torch.no_grad():
        states = state(ours(**batch))
    assert torch.equal(states, state(theirs(**batch)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_last_token_of_a_row_without_tokens(family):
    """transformers' head reads the row's first position then."""
    theirs, batch = model(family, "ForSequenceClassification"), padded_batch(family)
    batch["attention_mask"][1] = 0
    batch["input_ids"][1] = theirs.config.pad_token_id
    ours = fastenc.patch(copy.deepcopy(theirs))
    with pytest.warns(UserWarning, match="a row starts with padding"), torch.no_grad():
        logits = ours(**batch).logits
    assert torch.equal(logits, theirs(**batch).logits)


@pytest.mark.parametrize("trains", [False, True])
def test_an_adaptation_that_runs_in_single_ops(trains):
    peft = pytest.importorskip("peft")
    dora = peft.LoraConfig(
        r=4, target_modules=["query", "value"], use_dora=True, init_lora_weights=False
    )
    theirs = peft.get_peft_model(model("bert", **dropouts("bert")), dora).train(trains)
    ours = fastenc.patch(copy.deepcopy(theirs))
    same(ours, theirs, left(padded_batch("bert")), state, trains)


def test_the_warning_for_a_head_of_gemma_with_padding_on_the_left():
    """The padding's id is the configuration's: no warning may say otherwise."""
    theirs, batch = model("gemma3", "ForSequenceClassification"), left(padded_batch("gemma3"))
    ours = fastenc.patch(copy.deepcopy(theirs))
    reason = re.escape("the head reads padding (before a token)")
    with pytest.warns(UserWarning, match=reason), torch.no_grad():
        logits = ours(**batch).logits
    assert torch.equal(logits, theirs(**batch).logits)
