"""The table of calls and architectures in docs/not-fused.md, with a call for each row."""

import warnings

import pytest
import torch

from fastenc import patch
from fastenc.models.architectures import ARCHITECTURES
from tests.helpers import ROOT
from tests.helpers.families import model, padded_batch, whole

PAGE = (ROOT / "docs" / "not-fused.md").read_text(encoding="utf-8")
FUSED, OWN, HEAD = "fused", "transformers' forward", "the encoder fused, transformers' head"


def rows(title):
    """{first cell: second cell} of the table below a title."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1] for cells in lines[2:]}


def called(family="bert", task="Model", dtype=None, **changes):
    """A call of a patched model with two texts. A change is an argument, or a function of the batch."""

    def forward():
        fastencs = patch(model(family, task).to(dtype))
        batch = padded_batch(family, lengths=(5, 9))
        given = {k: v(batch) if callable(v) else v for k, v in changes.items()}
        fastencs(**{k: v for k, v in {**batch, **given}.items() if v is not None})

    return forward


def holes(batch):
    mask = batch["attention_mask"].clone()
    mask[:, 2] = 0
    return mask


def numbered(batch):
    return torch.arange(batch["input_ids"].shape[1])[None].expand_as(batch["input_ids"])


def embedded(batch):
    return torch.randn(*batch["input_ids"].shape, model("bert").config.hidden_size)


def padded_with_7(batch):
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)


def labels(batch):
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def labelled(family):
    def forward():
        model, batch = whole(family), padded_batch(family, lengths=(5, 9))
        batch["labels"] = labels(batch)
        cached = model(**batch, return_dict=False)
        assert len(patch(model)(**batch, return_dict=False)) == len(cached) - 1

    return forward


def traced():
    fastencs, batch = patch(model("bert")), padded_batch("bert", lengths=(5, 9))
    fastencs.config.return_dict = False
    torch.jit.trace(fastencs, (batch["input_ids"], batch["attention_mask"]), check_trace=False)


def transformed():
    fastencs, batch = patch(model("bert")), padded_batch("bert", lengths=(5, 9))
    several = torch.stack([batch["input_ids"]] * 2)
    torch.func.vmap(lambda ids: fastencs(input_ids=ids).last_hidden_state)(several)


first = lambda batch: torch.zeros(len(batch["input_ids"]), dtype=torch.long)
choices = {
    name: lambda batch, name=name: batch[name][None]
    for name in ("input_ids", "attention_mask", "token_type_ids")
}
leading = lambda batch: batch["attention_mask"].flip(1)
doubled = lambda batch: batch["attention_mask"] * 2
square = lambda batch: batch["attention_mask"][:, None, None].bool()
long = lambda batch: torch.full((2, 41), 7)
# row: [(a call, what runs)]
CALLS = {
    "`output_attentions=True`": [(called(output_attentions=True), OWN)],
    "`use_cache=True` of Qwen3 and Gemma 3": [
        (called(family, use_cache=True), FUSED) for family in ("qwen3", "gemma3")
    ],
    "`labels` of T5, mT5 and umT5": [(labelled(family), FUSED) for family in ("t5", "mt5", "umt5")],
    "`output_hidden_states=True`": [(called(output_hidden_states=True), FUSED)],
    "a mask of four dimensions": [(called(attention_mask=square), OWN)],
    "padding on the left": [
        *((called(f, attention_mask=leading), FUSED) for f in ("bert", "eurobert", "gemma3")),
        (called("embedding_gemma2", attention_mask=leading), FUSED),
        *((called(f, attention_mask=leading), OWN) for f in ("modernbert", "deberta", "esm")),
        (called("qwen3", "ForSequenceClassification", attention_mask=leading), FUSED),
        (called("gemma3", "ForSequenceClassification", attention_mask=leading), OWN),
    ],
    "an attention mask with other values than 0 and 1": [
        (called(family, attention_mask=doubled), FUSED) for family in ("bert", "deberta", "esm")
    ],
    "padding between tokens": [
        (called(attention_mask=holes), FUSED),
        (called("mpnet", attention_mask=holes), FUSED),
        *((called(family, attention_mask=holes), OWN) for family in ("modernbert", "longformer")),
    ],
    "a batch of BigBird that is too short for blocks": [(called("big_bird-sparse"), FUSED)],
    "masked tokens at a row's end that are not padding, as in ColBERT's query expansion": [
        (called(input_ids=padded_with_7), FUSED),
        (called("modernbert", input_ids=padded_with_7), OWN),
    ],
    "`position_ids`": [
        (called(position_ids=numbered), FUSED),
        *((called(family, position_ids=numbered), OWN) for family in ("modernbert", "bart")),
    ],
    "`inputs_embeds`": [
        (called(input_ids=None, inputs_embeds=embedded), FUSED),
        (called("esm", input_ids=None, inputs_embeds=embedded), OWN),
    ],
    "classification with Qwen3 and Gemma 3 and padding, from `inputs_embeds`, or if the padding's id is not "
    "`config.pad_token_id`": [
        (called(family, "ForSequenceClassification", **given), runs)
        for family, runs in (("qwen3", FUSED), ("gemma3", OWN))
        for given in (dict(input_ids=None, inputs_embeds=embedded), dict(input_ids=padded_with_7))
    ],
    "texts of M2M100 and NLLB beyond `max_position_embeddings`": [
        (called("m2m_100", input_ids=long, attention_mask=None), OWN)
    ],
    "`sequence_id` of ESM C, which marks the chains of a protein": [
        (called("esmc", sequence_id=lambda batch: torch.zeros_like(batch["input_ids"])), OWN)
    ],
    "`task_type_ids` of ERNIE": [
        (called("ernie", task_type_ids=lambda batch: batch["token_type_ids"]), OWN),
    ],
    "question answering with labels and padding": [
        (called(task="ForQuestionAnswering", start_positions=first, end_positions=first), FUSED),
        (
            called(
                *("deberta", "ForQuestionAnswering"), start_positions=first, end_positions=first
            ),
            OWN,
        ),
    ],
    "labels of a class for causal language models, and padding before a token": [
        (called(family, "ForCausalLM", attention_mask=leading, labels=labels), runs)
        for family, runs in (("bert", FUSED), ("qwen3", FUSED), ("gemma3", OWN))
    ],
    "multiple choice with padding, of RoFormer, and of ELECTRA unless its `summary_type` is `first`": [
        (called("roformer", "ForMultipleChoice", **choices), FUSED)
    ],
    "`num_items_in_batch` with a masked LM whose class takes it (ModernBERT)": [
        (called("modernbert", "ForMaskedLM", labels=labels, num_items_in_batch=3), HEAD),
    ],
    "`torch.jit.trace`, export to ONNX": [(traced, OWN)],
    "`torch.func`": [(transformed, OWN)],
    "float64, and float16 on a CPU": [
        (called(dtype=torch.float64), OWN),
        (called(dtype=torch.float16), OWN),
    ],
}


def test_every_row_has_a_call():
    assert rows("Calls").keys() == CALLS.keys()


@pytest.mark.parametrize(
    ("row", "forward", "runs"),
    [pytest.param(row, *each, id=f"{row}-{each[1]}") for row in CALLS for each in CALLS[row]],
)
def test_what_a_row_says_runs(row, forward, runs):
    said = rows("Calls")[row]
    # "Fused with padding" holds for some models only, as a paragraph says.
    assert said.startswith(runs) or "but for" in said or "with padding" in said
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        forward()
    own = [str(each.message) for each in given if "takes its own forward" in str(each.message)]
    assert len(own) == (0 if runs == FUSED else 1), own
    if runs == HEAD:
        assert "ForMaskedLM takes its own forward" in own[0]


@pytest.mark.parametrize(
    ("family", "task", "changes"),
    [
        ("big_bird", "Model", {"rescale_embeddings": True}),
        ("qwen3", "ForSequenceClassification", {}),
        ("gemma3", "ForSequenceClassification", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:fastenc. .* takes its own forward")
def test_given_vectors_mean_what_they_mean_to_transformers(family, task, changes):
    theirs = model(family, task, **changes)
    batch = padded_batch(family, lengths=(5, 9))
    batch["inputs_embeds"] = torch.randn(2, 9, theirs.config.hidden_size)
    del batch["input_ids"]
    real = batch["attention_mask"].bool() if task == "Model" else slice(None)
    with torch.no_grad():
        expected = theirs(**batch)[0][real]
        torch.testing.assert_close(patch(theirs)(**batch)[0][real], expected, rtol=0, atol=1e-5)


def test_the_architectures_are_those_of_transformers_that_we_lack():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named = {
        name.strip("`") for row in rows("Architectures") for name in row.split("(")[0].split(", ")
    }
    named = {name.strip("` ") for name in named}
    assert len(named) > 10
    assert named <= set(CONFIG_MAPPING_NAMES) and not named & set(ARCHITECTURES)
