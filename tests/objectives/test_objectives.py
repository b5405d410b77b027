"""Properties of every objective: weights of its parts, resuming, evaluation, and which tensors it never computes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from fastenc.objectives import OBJECTIVES
from fastenc.objectives.loss_terms import loss_terms
from fastenc.packing import pack_sequences
from fastenc.train import ObjectiveOptions
from fastenc.train.log import read_log
from tests.helpers import ROOT, objective_memory, training_run
from tests.helpers.training_run import (
    assert_bitwise_equal,
    build_objective,
    documents,
    small_model,
    tokenizer_of,
    weights,
)

# ul2 trains as span-corruption does, on other spans, which have tests of their own.
EVERY = pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ul2"])


def labelled_tokens(arguments):
    return int((arguments["labels"] != -100).sum())


def all_tokens(arguments):
    return arguments["batch"].cu_seqlens[-1].item()


# What each part of a loss is a mean over.
ITEMS = {
    **dict.fromkeys(("loss", "mlm", "kl", "sbo"), labelled_tokens),
    **dict.fromkeys(("rtd", "cosine"), all_tokens),
    "pair": lambda arguments: arguments["batch"].num_sequences,
}


@EVERY
def test_each_part_is_a_mean_over_all_of_its_items(name, tmp_path):
    """The gradient over unequal micro-batches is that of each part's sum over all, divided by its number of items."""
    settings = dict(accumulation=2, max_steps=1, dropout=0.0, max_grad_norm=0.0, batch_size=3)
    trainer = build_objective(tmp_path, name, **settings)
    model, gradients = trainer.plain_model, {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        gradients.update({n: p.grad.clone() for n, p in model.named_parameters()}),
        step(),
    )
    trainer.evaluate = None
    # A smaller last batch, so that the counts of every part differ.
    windows = [[[0, 1, 2], [3]]]
    trainer.schedule.batches_from = lambda step: iter(windows)
    reference = small_model(name, model.tokenizer)
    reference.load_state_dict(model.state_dict())
    trainer.train()
    sums: dict = {}
    counts: list = []
    for serial, indices in enumerate(windows[0]):
        arguments = trainer.collate([trainer.examples[i] for i in indices], serial)
        terms = loss_terms(reference.train()(**arguments))
        counts.append({part: ITEMS[part](arguments) for part in terms})
        for part, (mean, weight) in terms.items():
            sums[part] = sums.get(part, 0) + weight * mean * counts[-1][part]
    assert all(counts[0][part] != counts[1][part] for part in sums)
    loss = sum(total / sum(count[part] for count in counts) for part, total in sums.items())
    loss.backward()
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6, msg=key)
    logged = read_log(tmp_path / "log.jsonl")[0]
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert all(part in logged for part in sums)


@pytest.mark.parametrize("name", [n for n, each in OBJECTIVES.items() if not each.has_decoder])
def test_the_seed_and_the_options_reach_the_masks(name):
    tokenizer = tokenizer_of(name)

    def masked(step=0, seed=0, **options):
        given = ObjectiveOptions(name, block_size=32, **options)
        blocks = given.pack(documents(40), tokenizer)
        arguments = given.collator(tokenizer, blocks, seed)(blocks, step)
        labelled = arguments["labels"] != -100
        words = labelled | (arguments["batch"].input_ids > tokenizer.token_to_id("[MASK]"))
        return labelled, labelled.sum() / words.sum()

    first, share = masked()
    assert torch.equal(masked()[0], first)
    for other in ({"seed": 1}, {"step": 1}, {"seed": 1, "static": True}):
        assert not torch.equal(masked(**other)[0], masked(static="static" in other)[0])
    assert share == pytest.approx(0.15, abs=0.05)
    assert masked(probability=0.6)[1] == pytest.approx(0.6, abs=0.05)
    if "+" not in name:  # the segments of pairs change
        assert torch.equal(masked(static=True)[0], masked(step=1, static=True)[0])


@EVERY
def test_an_interrupted_run_resumes_bit_for_bit(name, tmp_path, monkeypatch):
    whole = build_objective(tmp_path / "whole", name).train()
    trainer = build_objective(tmp_path / "cut", name, save_every=2)
    step = trainer._optimiser_step

    def die(window):
        if trainer.step == 3:
            raise KeyboardInterrupt
        return step(window)

    monkeypatch.setattr(trainer, "_optimiser_step", die)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert build_objective(tmp_path / "cut", name, save_every=2).train(resume=True) == whole
    assert_bitwise_equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    if name == "electra":
        generators = (weights(tmp_path / run / "generator") for run in ("cut", "whole"))
        assert_bitwise_equal(*generators)


def test_training_does_not_depend_on_where_loaded_weights_lie(tmp_path, monkeypatch):
    """Bit for bit. PyTorch's product of one column, in ELECTRA's head, depends on the weight's alignment."""

    def loaded(*arguments):
        model = small_model(*arguments)
        for parameter in model.parameters():
            memory = torch.empty(parameter.numel() + 1)
            parameter.data = memory[1:].view_as(parameter).copy_(parameter.detach())
        return model

    new = build_objective(tmp_path / "new", "electra").plain_model
    monkeypatch.setattr(training_run, "small_model", loaded)
    resumed = build_objective(tmp_path / "loaded", "electra").plain_model
    for length in range(3, 64, 4):  # the rows after the last group of four
        batch = pack_sequences([[5 + i % 13 for i in range(length)]])
        assert torch.equal(new.eval()(batch).logits, resumed.eval()(batch).logits)


@EVERY
def test_evaluation_reports_each_part_and_repeats_itself(name, tmp_path):
    trainer = build_objective(tmp_path, name)
    model = trainer.plain_model.train()
    metrics = trainer.evaluate(model)
    torch.rand(3)
    assert trainer.evaluate(model) == metrics and model.training
    parts = metrics.keys() - {"perplexity"}
    single = name == "mlm" or OBJECTIVES[name].has_decoder
    assert parts == {"loss"} if single else {"loss", "mlm"} < parts
    of_tokens = metrics["loss" if single else "mlm"]
    assert metrics["perplexity"] == pytest.approx(math.exp(of_tokens))
    trainer.train()
    evaluations = [line for line in read_log(tmp_path / "log.jsonl") if "eval_loss" in line]
    assert len(evaluations) == 2
    assert all({f"eval_{part}" for part in parts} <= line.keys() for line in evaluations)
    assert evaluations[-1]["eval_loss"] < metrics["loss"], "nothing was learnt"
    best = json.loads((tmp_path / "metrics.json").read_text())
    assert best["loss"] == min(line["eval_loss"] for line in evaluations)


@pytest.fixture(scope="module")
def peaks():
    """{objective: [bytes with few and with many tokens, for a small vocabulary, and the same for a large one]}."""
    # The system's own count of memory. The process returns blocks of 16 KiB or more to it at once.
    frugal = {"MALLOC_MMAP_THRESHOLD_": str(2**14), "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-m", objective_memory.__name__]
    run = subprocess.run(command, env=os.environ | frugal, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def growth_by_vocabulary(few_words, many_words):
    """How many more bytes the additional tokens need if the vocabulary is larger."""
    return (many_words[1] - many_words[0]) - (few_words[1] - few_words[0])


(FEW_WORDS, MANY_WORDS), (FEW, MANY) = objective_memory.VOCABULARIES, objective_memory.SEQUENCES
LOGITS = 4 * (MANY_WORDS - FEW_WORDS) * (MANY - FEW) * objective_memory.LENGTH


@EVERY
def test_memory_does_not_grow_with_vocabulary_times_all_tokens(name, peaks):
    """The labelled tokens stay the same. A sixteenth of the other tokens' logits would be a quarter of a byte each."""
    assert growth_by_vocabulary(*peaks[name]) < LOGITS / 16


def test_every_tokens_logits_would_be_noticed(peaks):
    assert growth_by_vocabulary(*peaks[objective_memory.EVERY_LOGIT]) > LOGITS
