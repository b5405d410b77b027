import copy
import dataclasses
import inspect
import pickle
import re
import warnings

import pytest
import torch
import transformers

import fastenc
from tests.helpers.extension import needs_cpp
from tests.helpers.families import (
    BY_NAME,
    ENCODER_DECODERS,
    ENCODERS,
    FAMILIES,
    OTHER_HEADS,
    OTHER_NAMES,
    class_name,
    config,
    model,
    modeling_module,
    padded_batch,
    skip_without_autocast,
)
from tests.helpers.family_examples import MODEL_CLASSES
from tests.helpers.patching import (
    CHOICES,
    assert_same_gradients,
    assert_same_outputs,
    labels_for,
)

pytestmark = needs_cpp
TASKS = {
    "MaskedLM": ("logits",),
    "ForSequenceClassification": ("logits",),
    "ForTokenClassification": ("logits",),
    "ForQuestionAnswering": ("start_logits", "end_logits"),
}
EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def with_heads(*families):
    """Each family, with each of its heads."""
    lacks = lambda family, task: task == "ForQuestionAnswering" and BY_NAME[family].no_answers
    return [(family, task) for family in families for task in TASKS if not lacks(family, task)]


def task_model(family, task, **changes):
    name = "ForMaskedLM" if task == "MaskedLM" else task
    return model(family, name, **changes)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        *((family, "Model") for family in (*ENCODERS, *OTHER_NAMES)),
        *with_heads(*FAMILIES, *OTHER_NAMES),
        *((family, task) for task, families in OTHER_HEADS.items() for family in families),
    ],
)
def test_outputs_and_every_gradient_agree(family, task):
    theirs = task_model(family, task)
    ours = fastenc.patch(copy.deepcopy(theirs))
    padded, full = padded_batch(family), padded_batch(family, (12, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_agreement(ours, theirs, task, full, full.pop("attention_mask"))
        ours.zero_grad(), theirs.zero_grad()
        # What reads padding needs the model's own forward.
        warnings.filterwarnings("ignore", message=".*softmax over the padded length")
        warnings.filterwarnings("ignore", message=".*the head reads padding")
        assert_agreement(ours, theirs, task, padded, padded["attention_mask"])


def assert_agreement(ours, theirs, task, batch, mask):
    """Compare outputs, loss and every gradient. ``mask`` names the real tokens, also of a batch that has no mask."""
    taken = inspect.signature(theirs.forward).parameters
    if task == "ForMultipleChoice":
        batch = {name: ids.view(-1, CHOICES, ids.shape[1]) for name, ids in batch.items()}
    with torch.inference_mode():
        for switches in ({}, {"output_hidden_states": True}):
            assert_same_outputs(ours(**batch, **switches), theirs(**batch, **switches), mask)
    if task == "Model":
        weight = torch.randn(32) * mask[..., None]
        loss = lambda m: (m(**batch).last_hidden_state * weight).sum()
    else:
        # New ones for each model, because transformers' RemBERT changes them.
        loss = lambda m: m(**batch, **labels_for(task, {"attention_mask": mask}, taken)).loss
    a, b = loss(ours), loss(theirs)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    a.backward(), b.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("family", [f for f in BY_NAME if f not in ENCODER_DECODERS])
def test_every_class_with_a_head_is_compared(family):
    settings = config(family)
    classes = filter(inspect.isclass, vars(modeling_module(settings)).values())
    heads = {
        each.__name__
        for each in classes
        if re.search("For[A-Z]|LMHead", each.__name__)
        and isinstance(settings, getattr(each, "config_class", None) or ())
    }
    entry = BY_NAME[family]
    assert bool(heads) == (not entry.no_heads or bool(entry.heads))
    others = [task for task, families in OTHER_HEADS.items() if family in families]
    compared = {class_name(family, task) for task in (*MODEL_CLASSES, *others)}
    assert heads - {"LongformerForMultipleChoice"} <= compared  # test_longformer.py has that one


@EVERY_FAMILY
def test_labelled_logits_only_gives_the_same_loss_and_gradients(family):
    theirs = task_model(family, "MaskedLM")
    ours = fastenc.patch(copy.deepcopy(theirs), labelled_logits_only=True)
    batch = padded_batch(family)
    labels = labels_for("MaskedLM", batch)
    a, b = ours(**batch, **labels), theirs(**batch, **labels)
    assert a.logits is None
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-5)
    a.loss.backward(), b.loss.backward()
    assert_same_gradients(ours, theirs)
    assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


@EVERY_ENCODER
def test_masks_with_holes_positions_and_embeddings(family):
    theirs = model(family)
    ours = fastenc.patch(copy.deepcopy(theirs))
    entry, batch = BY_NAME[family], padded_batch(family)
    embeds = theirs.get_input_embeddings()(batch["input_ids"])
    by_embeds = {k: v for k, v in batch.items() if k != "input_ids"} | {"inputs_embeds": embeds}
    calls = [batch, {**batch, "position_ids": torch.arange(30).flip(0)[None] + 2}]
    if "inputs_embeds" in inspect.signature(theirs.forward).parameters:
        calls.append(by_embeds)
    holes = batch["attention_mask"].clone()
    holes[1, 3:6] = 0
    calls += [{**arguments, "attention_mask": holes} for arguments in calls]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        if entry.sees_distances:
            warnings.filterwarnings("ignore", message=".*a row has padding between tokens")
        if entry.sees_distances or entry.no_positions:
            warnings.filterwarnings("ignore", message=".*called with position_ids")
        if family == "esm":  # its embeddings need the ids
            warnings.filterwarnings("ignore", message=".*called with inputs_embeds")
        for arguments in calls:
            assert_same_outputs(ours(**arguments), theirs(**arguments), arguments["attention_mask"])


def test_tuples_positional_arguments_and_config_switches():
    theirs = model("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert")
    mask = batch["attention_mask"].bool()
    a, b = (m(*batch.values(), return_dict=False) for m in (ours, theirs))
    assert isinstance(a, tuple) and len(a) == len(b)
    torch.testing.assert_close(a[0][mask], b[0][mask], rtol=0, atol=1e-5)
    ours.config.output_hidden_states = theirs.config.output_hidden_states = True
    assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_dropout_is_applied_in_training_and_reproducible():
    ours = fastenc.patch(model("bert", "ForMaskedLM")).train()
    batch = padded_batch("bert")
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours(**batch).logits)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    ours.eval()
    assert torch.equal(ours(**batch).logits, ours(**batch).logits)


def test_bf16_autocast_keeps_dtypes_and_stays_close():
    theirs = model("bert", "ForMaskedLM")
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert")
    labels = labels_for("MaskedLM", batch)
    exact = theirs(**batch, **labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        a, b = ours(**batch, **labels), theirs(**batch, **labels)
        assert ours.bert(**batch).last_hidden_state.dtype == torch.float32
    assert abs(a.loss - exact) < 2 * abs(b.loss - exact) + 0.02
    a.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters() if p.grad is not None)


def test_parameters_are_read_live():
    """The next call uses an optimiser's step, a load_state_dict and a replaced parameter."""
    theirs = model("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert")
    with torch.no_grad():
        ours(**batch)
        for m in (ours, theirs):
            m.encoder.layer[0].output.dense.weight.mul_(1.5)
            m.encoder.layer[1].attention.self.key.weight = torch.nn.Parameter(torch.ones(32, 32))
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_checkpoints_are_untouched_and_unpatch_restores(tmp_path):
    theirs = model("bert", "ForSequenceClassification")
    ours = fastenc.patch(copy.deepcopy(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    batch = padded_batch("bert")
    assert torch.equal(again(**batch).logits, theirs(**batch).logits)
    assert fastenc.patch(ours) is ours and fastenc.unpatch(ours) is ours
    assert "forward" not in ours.__dict__ and "forward" not in ours.bert.__dict__
    assert torch.equal(ours(**batch).logits, theirs(**batch).logits)
    assert fastenc.unpatch(ours) is ours


@EVERY_ENCODER
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep copy", "pickle"]
)
def test_a_copy_is_patched_and_independent(family, copied):
    ours = fastenc.patch(model(family))
    batch = padded_batch(family)
    before = ours(**batch).last_hidden_state
    twin = copied(ours)
    real = batch["attention_mask"].bool()
    hidden = twin(**batch).last_hidden_state
    assert torch.equal(hidden, before) and not hidden[~real].any()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:  # RoFormer's table of angles is a constant
                parameter.zero_()
    assert not twin(**batch).last_hidden_state.any()
    assert torch.equal(ours(**batch).last_hidden_state, before)


def own_forward_warns(ours, theirs, batch, match, **options):
    with pytest.warns(UserWarning, match=match):
        a = ours(**batch, **options)
    b = theirs(**batch, **options)
    torch.testing.assert_close(a.last_hidden_state, b.last_hidden_state, rtol=0, atol=0)
    return a, b


def test_calls_it_does_not_cover_take_the_models_own_forward():
    theirs = model("bert", attn_implementation="eager")
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert")
    a, b = own_forward_warns(
        ours, theirs, batch, "called with output_attentions", output_attentions=True
    )
    assert len(a.attentions) == 2 and torch.equal(a.attentions[0], b.attentions[0])
    mask = batch["attention_mask"].clone()
    mask[0] = 0
    own_forward_warns(ours, theirs, {**batch, "attention_mask": mask}, "a row starts with padding")
    square = batch["attention_mask"][:, None, None, :].expand(-1, 1, 30, -1).bool()
    own_forward_warns(ours, theirs, {**batch, "attention_mask": square}, "not \\(batch, length\\)")
    # The hooks that remain after attentions were recorded do not end the acceleration.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_calls_that_the_model_refuses_are_refused():
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    ids = batch["input_ids"]
    calls = [
        lambda m: m(ids, input_ids=ids),
        lambda m: m(*[ids] * 20),
        lambda m: m(ids.float()),
        lambda m: m(ids, token_type_ids=torch.zeros_like(ids).bool()),
    ]
    for attempt in calls:
        with pytest.raises((TypeError, RuntimeError)) as expected:
            attempt(theirs)
        with warnings.catch_warnings(), pytest.raises(expected.type):
            warnings.simplefilter("ignore")
            attempt(ours)


def test_losses_that_read_padding_take_the_own_forward_of_models_that_cannot_keep_it():
    for task, match in (
        ("ForQuestionAnswering", "softmax over the padded length"),
        ("ForTokenClassification", "a padding token has a label"),
        ("ForMaskedLM", "a padding token has a label"),
    ):
        theirs = model("deberta-v2", task)
        ours = fastenc.patch(copy.deepcopy(theirs))
        batch = padded_batch("deberta-v2")
        labels = labels_for(task, batch)
        if "labels" in labels:
            labels = {"labels": torch.ones_like(batch["input_ids"])}
        with pytest.warns(UserWarning, match=match):
            loss = ours(**batch, **labels).loss
        assert torch.equal(loss, theirs(**batch, **labels).loss)
        # The next call has no such labels and is fused again: every padding token has the head's value for a zero
        # vector.
        padding = batch["attention_mask"] == 0
        states = ours.base_model(**batch).last_hidden_state
        assert not states[padding].any()


@pytest.mark.parametrize("summary", ["first", "last", "mean", "cls_index"])
def test_heads_that_read_padding_find_its_states(summary):
    theirs = model("electra", "ForMultipleChoice", summary_type=summary)
    ours = fastenc.patch(copy.deepcopy(theirs))
    padded, full = padded_batch("electra"), padded_batch("electra", (12,) * 4)
    for batch in (padded, full):
        batch = {name: value.view(2, 2, -1) for name, value in batch.items()}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            logits = ours(**batch).logits
        torch.testing.assert_close(logits, theirs(**batch).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("collated", [False, True], ids=["", "noted by the collator"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_heads_that_find_the_last_token_by_its_id_may_read_padding(family, collated):
    theirs = model(family, "ForSequenceClassification")
    right, others, several = (padded_batch(family) for _ in range(3))
    others["input_ids"][others["attention_mask"] == 0] = 7
    several["input_ids"][0, -1] = 7
    for batch, reads in ((right, False), (others, True), (several, True)):
        expected = theirs(**batch).logits
        if collated:
            batch = fastenc.DataCollatorWithSeqlens(dict)(batch)
        with warnings.catch_warnings(record=True) as seen, torch.no_grad():
            warnings.simplefilter("always")
            logits = fastenc.patch(copy.deepcopy(theirs))(**batch).logits
        messages = [str(each.message) for each in seen]
        own = reads and family == "gemma3"  # its windows hide real tokens from padding
        assert ["its ids are not config.pad_token_id" in each for each in messages] == [True] * own
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("collated", [False, True], ids=["", "noted by the collator"])
def test_states_of_masked_tokens_that_are_not_padding(collated):
    """ColBERT reads those of its query expansion: mask tokens behind the query, which attention does not see."""
    theirs, batch = model("modernbert"), padded_batch("modernbert")
    batch["input_ids"][batch["attention_mask"] == 0] = 96
    expected = theirs(**batch).last_hidden_state
    if collated:
        batch = fastenc.DataCollatorWithSeqlens(dict)(batch)
    ours = fastenc.patch(copy.deepcopy(theirs))
    with pytest.warns(
        UserWarning, match="masked tokens have the id 96 and not config.pad_token_id"
    ):
        states = ours(**batch).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=0, atol=0)
    ours.config.pad_token_id = 96
    assert not ours(**batch).last_hidden_state[batch["attention_mask"] == 0].any()


def test_masked_tokens_of_no_meaning_are_padding():
    """Zeros, as PyTorch pads with, and random ids, as in a benchmark; but not mask tokens among padding."""
    ours, batch = fastenc.patch(model("roberta")), padded_batch("roberta")
    padding, ids = batch["attention_mask"] == 0, batch["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for filled in (torch.zeros_like(ids), torch.randint(2, 90, ids.shape)):
            batch["input_ids"] = torch.where(padding, filled, ids)
            assert not ours(**batch).last_hidden_state[padding].any()
    batch["input_ids"] = ids.clone()
    batch["input_ids"][:, -1] = 90
    assert ours(**batch).last_hidden_state[padding].any()


def test_esm_counts_the_mask_tokens_of_the_padding():
    theirs, batch = model("esm", "ForMaskedLM"), padded_batch("esm")
    ours, padding = fastenc.patch(copy.deepcopy(theirs)), batch["attention_mask"] == 0
    batch["input_ids"][:, ::3] = theirs.config.mask_token_id
    assert (batch["input_ids"][padding] == theirs.config.mask_token_id).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_gradient_checkpointing_gives_the_same_gradients():
    theirs = model(
        "bert",
        "ForSequenceClassification",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ours = fastenc.patch(copy.deepcopy(theirs))
    ours.gradient_checkpointing_enable()
    batch = padded_batch("bert")
    grads = []
    for m in (ours.train(), theirs.train()):
        m(**batch, labels=torch.tensor([0, 1, 1, 0])).loss.backward()
        grads.append([p.grad for p in m.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_works_under_the_trainer(tmp_path, smoothing):
    """Same data, same seed, no dropout: the Trainer's losses agree at every step, and so does its evaluation."""
    from transformers import Trainer, TrainingArguments

    rows = [
        {"input_ids": torch.randint(5, 97, (n,)).tolist(), "labels": n % 2}
        for n in (5, 9, 30, 12) * 4
    ]

    def collate(examples):
        batch = padded_batch("bert", [len(e["input_ids"]) for e in examples])
        for row, example in zip(batch["input_ids"], examples, strict=True):
            row[: len(example["input_ids"])] = torch.tensor(example["input_ids"])
        return {**batch, "labels": torch.tensor([e["labels"] for e in examples])}

    losses = []
    for name, collator in (
        ("own", collate),
        ("patched", collate),
        ("sizes noted", fastenc.DataCollatorWithSeqlens(collate)),
    ):
        m = model(
            "bert",
            "ForSequenceClassification",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        if name != "own":
            fastenc.patch(m)
        arguments = TrainingArguments(
            tmp_path / name,
            label_smoothing_factor=smoothing,
            max_steps=6,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            seed=3,
            use_cpu=True,
            learning_rate=1e-3,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            m, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    own, *ours = map(torch.tensor, losses)
    assert len(own) == 7
    for values in ours:
        torch.testing.assert_close(values, own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "task"), with_heads(*FAMILIES))
def test_calls_with_sizes_noted_by_the_collator(family, task):
    theirs = task_model(family, task)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch(family)
    if task != "ForQuestionAnswering":  # its loss includes padding: the model's own forward
        batch |= labels_for(task, batch)
    collated = fastenc.DataCollatorWithSeqlens(dict)(batch)
    assert "batch_metadata" in collated
    output, expected = ours(**collated), theirs(**batch)
    assert_same_outputs(output, expected, batch["attention_mask"])


def test_the_noted_sizes_can_be_moved_as_lightning_moves_a_batch():
    """It copies a dataclass and sets every field of the copy (lightning_utilities' apply_to_collection)."""
    metadata = fastenc.DataCollatorWithSeqlens(dict)(padded_batch("bert"))["batch_metadata"]
    moved = copy.deepcopy(metadata)
    for field in dataclasses.fields(metadata):
        setattr(moved, field.name, getattr(metadata, field.name))
    assert moved == metadata


def test_a_collator_with_seqlens_has_the_collators_attributes():
    collator = pickle.loads(pickle.dumps(fastenc.DataCollatorWithSeqlens(DataCollator())))
    assert collator.tokenizer == "the tokenizer"
    assert collator(padded_batch("bert"))["batch_metadata"].padding > 0
    with pytest.raises(AttributeError, match="nothing"):
        _ = collator.nothing


class DataCollator:
    tokenizer = "the tokenizer"

    def __call__(self, features):
        return features


@pytest.mark.parametrize("labelled_logits_only", [False, True])
def test_labels_in_one_row_and_no_label(labelled_logits_only):
    theirs = model("bert", "ForMaskedLM")
    ours = fastenc.patch(copy.deepcopy(theirs), labelled_logits_only=labelled_logits_only)
    batch = padded_batch("bert")
    labels = labels_for("MaskedLM", batch)["labels"]
    for given in (labels, labels.flatten(), torch.full_like(labels, -100)):
        expected = theirs(**batch, labels=given).loss
        loss = ours(**batch, labels=given).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for wrong in (labels[:, 1:], torch.cat([labels, labels])):
        with pytest.raises(
            ValueError,
            match=r"labels must have one value for each of the \d+ x \d+ tokens, got shape",
        ):
            ours(**batch, labels=wrong)


def test_a_patched_model_can_be_compiled():
    theirs = model("bert", "ForSequenceClassification")
    ours = torch.compile(fastenc.patch(copy.deepcopy(theirs)), backend="eager")
    batch = padded_batch("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = ours(**batch, labels=torch.tensor([0, 1, 1, 0]))
    expected = theirs(**batch, labels=torch.tensor([0, 1, 1, 0]))
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_half_precision_on_a_cpu_takes_the_models_own_forward():
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        own_forward_warns(ours, theirs, batch, "no fused attention for torch.float16 on cpu")


def test_sizes_of_another_batch_are_refused():
    ours = fastenc.patch(model("bert", "ForSequenceClassification"))
    metadata = fastenc.DataCollatorWithSeqlens(dict)(padded_batch("bert"))["batch_metadata"]
    batch = padded_batch("bert")
    batch["attention_mask"][:, 1] ^= 1
    with pytest.raises(
        ValueError,
        match=r"must be those that DataCollatorWithSeqlens has counted, got a call with .*labelled",
    ):
        ours(**batch, batch_metadata=metadata)
    part = {name: value[:2] for name, value in batch.items()}
    theirs = model("bert", "ForSequenceClassification")
    assert_same_outputs(
        ours(**part, batch_metadata=metadata), theirs(**part), part["attention_mask"]
    )


def test_sentence_transformers_model():
    from sentence_transformers import SentenceTransformer

    from fastenc.demo.checkpoint import minilm_folder

    theirs = SentenceTransformer(str(minilm_folder()), device="cpu")
    texts = ["A short text.", "Another one, a little longer than the first.", "Third"]
    before = theirs.encode(texts)
    fastenc.patch(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = theirs.encode(texts)
    torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=0, atol=1e-5)
    fastenc.unpatch(theirs)
    assert (theirs.encode(texts) == before).all()


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("asked", [[0, 2], [-1], [1], 1, [], [7], True, None])
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_hidden_states_of_some_layers(family, task, asked, configured):
    """States that were not asked for are None, where transformers does so: since 5.23, and never for MPNet."""
    theirs = model(family, task, output_hidden_states=configured)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        states, expected = (
            m(**batch, output_hidden_states=asked).hidden_states for m in (ours, theirs)
        )
    assert (states is None) == (expected is None)
    for a, b in zip(states or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a[real], b[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_return_dict_of_none_is_the_configurations(family):
    theirs = model(family, return_dict=False)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    with torch.no_grad():
        a, b = (m(**batch, return_dict=None) for m in (ours, theirs))
    assert type(a) is type(b) and len(a) == len(b)


def assert_same_tuples(outputs, expected, real):
    assert type(outputs) is type(expected) and len(outputs) == len(expected)
    for a, b in zip(outputs, expected, strict=True):
        if torch.is_tensor(b):
            padded = b.shape[:2] == real.shape
            torch.testing.assert_close(
                *((t[real] if padded else t) for t in (a, b)), rtol=0, atol=1e-5
            )
        elif b is None:
            assert a is None
        else:
            assert_same_tuples(a, b, real)


@pytest.mark.parametrize(
    "family, task",
    [*((family, "Model") for family in ENCODERS), *with_heads("mpnet", "bert", "modernbert")],
)
@pytest.mark.parametrize("states", [False, True])
def test_tuples_have_the_entries_of_the_models_own(family, task, states):
    theirs = task_model(family, task)
    if getattr(theirs, "pooler", None) is not None:
        theirs = type(theirs)(theirs.config, add_pooling_layer=False).eval()
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    options = dict(return_dict=False, output_hidden_states=states)
    with torch.no_grad():
        outputs, expected = (m(**batch, **options) for m in (ours, theirs))
    assert_same_tuples(outputs, expected, batch["attention_mask"].bool())


@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_inputs_without_a_batch_dimension_are_refused(task):
    ours = fastenc.patch(model("bert", task))
    with pytest.raises(ValueError, match=r"input_ids must be \(batch, length\), got shape \(5,\)"):
        ours(input_ids=torch.arange(5))


@EVERY_FAMILY
def test_dtypes_under_autocast_are_the_models(family):
    skip_without_autocast(family)
    theirs = model(family)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs, expected = (m(**batch, output_hidden_states=True) for m in (ours, theirs))
    assert outputs.last_hidden_state.dtype == expected.last_hidden_state.dtype
    for a, b in zip(outputs.hidden_states, expected.hidden_states, strict=True):
        assert a.dtype == b.dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_under_autocast_have_the_models_dtype(family):
    """ESM's masked-LM head adds its bias after the product, in float32."""
    skip_without_autocast(family)
    theirs = model(family, "ForMaskedLM")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    real = batch["attention_mask"].bool()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits, expected = (m(**batch).logits[real] for m in (ours, theirs))
    assert logits.dtype == expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.1)


def test_unsupported_models_are_refused():
    from transformers import GPT2Config, GPT2Model

    tiny = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
    with pytest.raises(
        ValueError, match=r"patch supports .*, BertModel, .*got GPT2Model over GPT2Model"
    ):
        fastenc.patch(tiny)
    with pytest.raises(ValueError, match="is_decoder must be False, got True"):
        fastenc.patch(model("bert", "LMHeadModel", is_decoder=True))
    with pytest.raises(
        ValueError, match=r"needs a model of transformers.*got Linear: give the loaded model"
    ):
        fastenc.patch(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"labelled_logits_only is for .*got BertModel"):
        fastenc.patch(model("bert"), labelled_logits_only=True)
    assert config("bert").hidden_size == 32


class ScoreOfTexts(transformers.PreTrainedModel):
    """A class of another library around an encoder, which a class of its own calls."""

    config_class = transformers.BertConfig

    def __init__(self, encoder):
        super().__init__(encoder.config)
        self.scorer = torch.nn.ModuleDict({"encoder": encoder})
        self.head = torch.nn.Linear(encoder.config.hidden_size, 1)
        self.post_init()

    def forward(self, **batch):
        return self.head(self.scorer["encoder"](**batch).last_hidden_state[:, 0])


def test_an_encoder_inside_a_model_of_another_class_is_patched():
    theirs = ScoreOfTexts(model("bert", attn_implementation="eager")).eval()
    ours, batch = copy.deepcopy(theirs), padded_batch("bert")
    assert fastenc.patch(ours) is ours
    encoder = ours.scorer["encoder"]
    with torch.no_grad():
        for frozen in (False, True):
            torch.testing.assert_close(ours(**batch), theirs(**batch), rtol=0, atol=1e-5)
            assert not encoder(**batch).last_hidden_state[batch["attention_mask"] == 0].any()
            assert fastenc.encoder_of(ours).config.hidden_size == 32
            if not frozen:
                fastenc.freeze(ours)
    assert "forward" not in vars(fastenc.unpatch(ours).scorer["encoder"])


def test_every_model_inside_a_module_is_patched():
    from transformers import GPT2Config, GPT2Model

    unknown = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
    several = torch.nn.ModuleList(
        [unknown, model("bert"), model("t5"), model("roberta", "ForMaskedLM")]
    )
    with pytest.warns(UserWarning, match="GPT2Model in ModuleList is not patched: patch supports"):
        fastenc.patch(several)
    is_patched = lambda module: "forward" in vars(module)
    assert [is_patched(each) for each in several] == [False, True, True, True]
    assert is_patched(several[3].roberta)
    fastenc.unpatch(several)
    assert not any(map(is_patched, several.modules()))
    # All are checked before any is patched.
    several.append(model("bert", "LMHeadModel", is_decoder=True))
    with pytest.raises(ValueError, match="is_decoder must be False, got True"):
        fastenc.patch(several)
    assert not any(map(is_patched, several.modules()))


def test_gemma3s_window_is_the_models_whatever_the_configuration_writes(monkeypatch):
    """transformers 5.10 writes the number of tokens on one side, the token itself included."""
    theirs, batch = model("gemma3"), padded_batch("gemma3")
    config_class = type(theirs.config)
    written = config_class.to_dict
    old = lambda config: {**written(config), "sliding_window": config.sliding_window}
    monkeypatch.setattr(config_class, "to_dict", old)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[real]
        ours = fastenc.patch(theirs)(**batch).last_hidden_state[real]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
