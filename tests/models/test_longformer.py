"""Longformer against transformers: global tokens of every choice, windows by layer, questions, dropout, files."""

import copy
import json
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import fastenc
import fastenc.nn.global_attention as global_attention
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, QuestionAnswerer, SequenceClassifier
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.nn.ways import fused_sublayers
from fastenc.ops import int8_products
from fastenc.packing import pack, pack_sequences
from tests.helpers.checkpoints import packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import in_float64, model, padded_batch
from tests.helpers.family_examples import (
    MODEL_CLASSES,
    Example,
    assert_same_results,
    gradients,
    within,
)
from tests.helpers.patching import assert_same_gradients

LENGTHS = (5, 17, 1, 30)


def marked(mask):
    """A mask of global tokens: first ones, some inside, none of a row, and one of padding, which does not count."""
    chosen = torch.zeros_like(mask)
    chosen[0, 0] = chosen[1, 3] = chosen[1, 16] = chosen[0, 7] = 1
    chosen[3, :4] = 1
    return chosen


@pytest.mark.parametrize("windows", [[8, 4], [4, 64]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@needs_cpp
def test_states_and_gradients_with_global_tokens(windows, dtype, tmp_path):
    theirs = model("longformer", attention_window=windows).to(dtype)
    loaded = Encoder.from_pretrained(save(theirs, tmp_path), dtype=dtype)
    patched, exact = fastenc.patch(copy.deepcopy(theirs)), in_float64(theirs)
    padded = padded_batch("longformer", LENGTHS)
    mask = padded["attention_mask"].bool()
    chosen = marked(padded["attention_mask"])
    batch, weight = pack(**padded, global_attention_mask=chosen), torch.randn(32)
    assert len(batch.global_tokens) == chosen[mask].sum()
    twos = padded["attention_mask"] * (chosen + 1)
    calls = {
        "plain": lambda: theirs(**padded, global_attention_mask=chosen)[0][mask],
        "exact": lambda: exact(**padded, global_attention_mask=chosen)[0][mask],
        "loaded": lambda: loaded(batch).last_hidden_state,
        "patched": lambda: patched(**padded, global_attention_mask=chosen)[0][mask],
        "marked by 2": lambda: patched(padded["input_ids"], twos)[0][mask],
    }
    models = {"plain": theirs, "exact": exact, "loaded": loaded}
    states, grads = {}, {}
    for name, compute in calls.items():
        owner = models.get(name, patched)
        owner.zero_grad()
        with torch.no_grad():  # another way of running the layer
            states[f"{name}, inference"] = compute()
        states[name] = compute()
        (states[name] * weight.to(states[name])).sum().backward()
        grads[name] = gradients(owner)
    largest = max(float(each.norm()) for each in grads["exact"].values())
    floor = (0.1 if dtype == torch.float32 else 1e-3) * largest
    for name, result in states.items():
        if not name.startswith(("plain", "exact")):
            within(
                result.detach(),
                states["plain"].detach(),
                states["exact"].detach(),
                0.0,
                name,
                dtype,
            )
    for name in ("loaded", "patched"):
        assert len([key for key in grads[name] if "_global" in key]) == 2 * 2 * 3
        for key, result in grads[name].items():
            within(result, grads["plain"][key], grads["exact"][key], floor, f"{name} {key}", dtype)


@pytest.mark.parametrize("task", MODEL_CLASSES)
@needs_cpp
def test_global_tokens_of_a_call_in_every_task(task, tmp_path):
    """Also where the task would choose them itself."""
    theirs = model("longformer", task, attention_window=[4, 8])
    example = Example("longformer", task, global_tokens=True)
    assert_same_results(theirs, example, folder=save(theirs, tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@needs_cpp
def test_every_way_of_training_has_the_same_results_and_dropout(dtype, monkeypatch, tmp_path):
    path = save(model("longformer", attention_probs_dropout_prob=0.4), tmp_path)
    padded = padded_batch("longformer", LENGTHS)
    batch = pack(**padded, global_attention_mask=marked(padded["attention_mask"]))
    weight, states, grads = torch.randn(32), {}, {}
    for name, folds, fused, of in (
        ("exact", False, False, torch.float64),
        ("plain", False, False, dtype),
        ("single ops, folded", True, False, dtype),
        ("fused, projected", False, True, dtype),
        ("fused, folded", True, True, dtype),
    ):
        encoder = Encoder.from_pretrained(path, dtype=of).train()
        torch.manual_seed(0)
        with monkeypatch.context() as patches:
            patches.setattr(global_attention, "_folding_is_cheaper", lambda *_, f=folds: f)
            if not fused:
                patches.setattr(fused_sublayers, "unsupported_reason", lambda _: "switched off")
            states[name] = encoder(batch).last_hidden_state
            (states[name] * weight.to(of)).sum().backward()
        grads[name] = gradients(encoder)
    largest = max(float(each.norm()) for each in grads["exact"].values())
    floor = (0.1 if dtype == torch.float32 else 1e-3) * largest
    for name in list(states)[2:]:
        three = (states[each].detach() for each in (name, "plain", "exact"))
        within(*three, 0.0, name, dtype)
        for key, result in grads[name].items():
            within(result, grads["plain"][key], grads["exact"][key], floor, f"{name} {key}", dtype)


def test_folding_is_chosen_where_it_multiplies_less():
    spec = AttentionSpec(12, 64, 0.125)
    cheaper = [global_attention._folding_is_cheaper(4096, n, 768, spec) for n in (0, 1, 30, 90)]
    assert cheaper == [True, True, True, False]


@needs_cpp
def test_the_question_is_global(tmp_path):
    theirs = model("longformer", "ForQuestionAnswering")
    ours = QuestionAnswerer.from_pretrained(save(theirs, tmp_path))
    padded = padded_batch("longformer", (12, 30, 21))
    mask = padded["attention_mask"].bool()
    for row, (end, length) in enumerate(((4, 12), (9, 30), (1, 21))):
        padded["input_ids"][row, [end, end + 1, length - 1]] = 2
    with torch.no_grad():
        scores = theirs(**padded)
        by_patch = fastenc.patch(copy.deepcopy(theirs))(**padded)
    expected = torch.stack([scores.start_logits, scores.end_logits], -1)[mask]
    logits = ours(packed(padded), torch.tensor([[6, 7], [12, 20], [0, 0]])).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(by_patch.start_logits[mask], expected[:, 0], rtol=0, atol=2e-5)
    # Without a separator, the first token alone is global.
    batch = pack_sequences([[0, 7, 8], [0, 7, 2, 2, 9, 2]])
    assert ours.encoder_batch(batch).global_tokens.tolist() == [0, 3, 4]
    ours.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert torch.equal(again(**padded).end_logits, scores.end_logits)


@needs_cpp
def test_patched_multiple_choice_has_the_global_tokens_of_transformers():
    """Those after each choice's second separator."""
    theirs = model("longformer", "ForMultipleChoice")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 97, (2, 3, 14), generator=draw)
    ids[:, :, 4:6] = ids[:, :, 13] = 2
    mask = torch.ones_like(ids)
    ids[1, :, 11], ids[1, :, 12:], mask[1, :, 12:] = 2, 1, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0])}
    patched = fastenc.patch(copy.deepcopy(theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours, wanted = patched(**batch), theirs(**batch)
    torch.testing.assert_close(ours.logits, wanted.logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.loss, wanted.loss, rtol=0, atol=2e-5)
    ours.loss.backward(), wanted.loss.backward()
    assert_same_gradients(patched, theirs)


def test_what_the_batch_says_of_global_tokens_is_taken():
    config = EncoderConfig(
        97, 32, 2, 2, 48, 40, 2, family="longformer", extra={"attention_window": 4}
    )
    m = SequenceClassifier(config, num_labels=2).eval()
    batch = pack_sequences([[5, 6, 7, 8, 9, 5, 6], [7] * 9])
    first = torch.tensor([0, 7])
    with torch.no_grad():
        default, none, given, same = (
            m(batch if chosen is None else replace(batch, global_tokens=chosen)).logits
            for chosen in (None, first[:0], torch.tensor([1, 9]), first)
        )
    assert torch.equal(default, same)
    assert not torch.allclose(default, none) and not torch.allclose(default, given)


def test_global_tokens_follow_the_batch_in_every_copy():
    batch = pack_sequences([[5, 6, 7], [8], [9, 5]])
    chosen = replace(batch, global_tokens=torch.tensor([0, 2, 4]))
    assert chosen.to("cpu").global_tokens.tolist() == [0, 2, 4]
    parts = chosen.split([(1, 3, 3), (2, 3, 2)])
    assert [part.global_tokens.tolist() for part in parts] == [[0, 2], [1]]
    with pytest.raises(ValueError, match=r"global_tokens must ascend .* got \[2, 0\]"):
        replace(batch, global_tokens=torch.tensor([2, 0]))


@needs_cpp
def test_dropout_repeats_and_frozen_weights_compute_the_same(tmp_path):
    theirs = model("longformer", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    batch = pack(**padded_batch("longformer", LENGTHS), global_attention_mask=torch.eye(4, 30))
    plain = ours.eval()(batch).last_hidden_state
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours.train()(batch).last_hidden_state)
    assert torch.equal(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])
    assert not torch.allclose(runs[0], plain)
    fastenc.freeze(ours.eval())
    with torch.no_grad():
        torch.testing.assert_close(ours(batch).last_hidden_state, plain, rtol=0, atol=2e-5)


@pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
def test_int8_attends_to_and_from_global_tokens(tmp_path):
    """A window of four tokens, so that texts of 30 look otherwise without their global tokens."""
    theirs = model("longformer", attention_window=[4, 4])
    padded = padded_batch("longformer", LENGTHS)
    mask, chosen = padded["attention_mask"].bool(), marked(padded["attention_mask"])
    batch = pack(**padded, global_attention_mask=chosen)
    patched = fastenc.freeze(fastenc.patch(copy.deepcopy(theirs)), dtype="int8")
    loaded = Encoder.from_pretrained(save(theirs, tmp_path), dtype="int8")
    with torch.no_grad():
        exact = theirs(**padded, global_attention_mask=chosen)[0][mask]
        local = theirs(**padded)[0][mask]
        states = patched(**padded, global_attention_mask=chosen)[0][mask]
        assert torch.equal(loaded(batch).last_hidden_state, states)
    error = (states - exact).norm(dim=1) / exact.norm(dim=1)
    without = (local - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.03
    assert without[chosen[mask].bool()].min() > 0.3 and without.median() > 0.05


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (7, "attention_window must be an even integer above 0"),
        ([8, 0], "attention_window must be an even integer above 0"),
        ([8, 8, 8], "attention_window must have a number for each of the 2 layers, got 3"),
    ],
    ids=str,
)
def test_wrong_windows(windows, message, tmp_path):
    save(model("longformer"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_window": windows}))
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(tmp_path)


def test_a_tokenizer_of_types_beside_a_model_of_one_type(tmp_path):
    """transformers would look up the second text's type in a table of one row."""
    encoder = Encoder.from_pretrained(save(model("longformer"), tmp_path / "theirs"))
    encoder.tokenizer = train_tokenizer(["a small dog", "two men play"], vocab_size=60)
    encoder.save_pretrained(tmp_path / "ours")
    given = AutoTokenizer.from_pretrained(tmp_path / "ours")("a dog", "men", return_tensors="pt")
    assert set(given) == {"input_ids", "attention_mask"}
    assert encoder.tokenizer.encode("a dog", "men").type_ids[-1] == 1
    AutoModel.from_pretrained(tmp_path / "ours")(**given)
