import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_run import build

from fastenc.models import EncoderConfig, MaskedLM
from fastenc.train import TrainConfig, Trainer
from fastenc.train import checkpoint as checkpoints
from fastenc.train.log import read_log
from fastenc.train.optimizer import parameter_groups, rate_factor

SCRIPT = Path(__file__).with_name("training_run.py")


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_bitwise_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, build(folder).train()


def run_script(folder, *settings, **options):
    command = [sys.executable, str(SCRIPT), str(folder), *settings]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_loss_falls_and_the_best_model_is_left(uninterrupted):
    folder, metrics = uninterrupted
    lines = read_log(folder / "log.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 21 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(line["tokens_per_s"] > 0 for line in lines if "loss" in line)
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(evaluations) == 3 and metrics["loss"] == min(evaluations)
    assert metrics["perplexity"] == pytest.approx(2.718281828 ** metrics["loss"], rel=1e-6)
    best = json.loads((folder / "best.json").read_text())
    assert_bitwise_equal(weights(folder), weights(folder / best["checkpoint"]))
    assert len(checkpoints.checkpoints(folder)) in (2, 3)
    assert (folder / "curves.png").stat().st_size > 5000
    files = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json", ".jsonl", ".png"}, "no pickles"


def test_the_result_loads_in_transformers(uninterrupted):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, _ = uninterrupted
    theirs = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the cat sat on the mat"], return_tensors="pt")
    ours = MaskedLM.from_pretrained(folder)
    from fastenc.packing import pack

    result = ours(pack(batch["input_ids"])).logits
    torch.testing.assert_close(result, theirs.eval()(**batch).logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("after", [3, 8, 17])
def test_killed_at_any_step_and_resumed_gives_the_same_weights(uninterrupted, tmp_path, after):
    """SIGKILL once the log has reached a step; the resumed run ends with the uninterrupted one's weights."""
    process = run_script(tmp_path)
    log = tmp_path / "log.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if any(line["step"] >= after for line in read_log(log)):
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if process.returncode != 0:
        assert process.returncode == -signal.SIGKILL
    metrics = build(tmp_path).train(resume=True)
    folder, expected = uninterrupted
    assert metrics == expected
    assert_bitwise_equal(weights(tmp_path), weights(folder))
    steps = [line["step"] for line in read_log(log) if "loss" in line]
    assert steps == list(range(1, 22)), "the log has each step once"


def test_killed_while_a_checkpoint_is_written(uninterrupted, tmp_path, monkeypatch):
    """The folder half written is never taken for a checkpoint."""

    class Killed(BaseException):
        pass

    real = checkpoints._flat_optimizer

    def die(model, optimizer):
        if len(checkpoints.checkpoints(tmp_path)) == 2:
            raise Killed
        return real(model, optimizer)

    monkeypatch.setattr(checkpoints, "_flat_optimizer", die)
    with pytest.raises(Killed):
        build(tmp_path).train()
    assert list(tmp_path.glob(".checkpoint-*.tmp")), "what a kill leaves behind"
    monkeypatch.undo()
    build(tmp_path).train(resume=True)
    assert_bitwise_equal(weights(tmp_path), weights(uninterrupted[0]))
    assert not list(tmp_path.glob(".checkpoint-*.tmp"))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    import safetensors.torch

    real = safetensors.torch.save_file

    def full(tensors, path, **options):
        if len(checkpoints.checkpoints(tmp_path)) == 1:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    message = r"checkpoint at step 6 could not be written.*No space left.*last good checkpoint is .*checkpoint-00000003"
    with pytest.raises(OSError, match=message):
        build(tmp_path).train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-00000003"]
    assert not list(tmp_path.rglob("*.tmp")), "temporary files were left"
    weights(tmp_path / "checkpoint-00000003")


def test_resuming_with_other_settings_is_refused(uninterrupted):
    folder, _ = uninterrupted
    with pytest.raises(
        ValueError, match=r"holds a run \(checkpoint-00000021\): resume it, or give another"
    ):
        build(folder).train()
    with pytest.raises(
        ValueError, match=r"written with learning_rate=0.002, this run has 0.01: resuming would"
    ):
        build(folder, learning_rate=0.01).train(resume=True)


def test_a_corrupt_checkpoint_is_named(tmp_path):
    build(tmp_path, max_steps=2, eval_every=2).train()
    path = tmp_path / "checkpoint-00000002" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint-00000002 is corrupt"):
        build(tmp_path, max_steps=2, eval_every=2).train(resume=True)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = build(tmp_path)
    with torch.no_grad():
        trainer.plain_model.head.bias.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"the loss is nan at step 1: lower learning_rate"):
        trainer.train()


def test_micro_batches_count_by_their_labelled_tokens(tmp_path):
    """The gradient of two unequal micro-batches is that of all their labelled tokens' mean loss (no dropout)."""
    trainer = build(tmp_path, accumulation=2, max_steps=1, dropout=0.0, max_grad_norm=0.0)
    model, gradients = trainer.plain_model, {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        gradients.update({n: p.grad.clone() for n, p in model.named_parameters()}),
        step(),
    )
    first = list(trainer.sampler.epoch(0))[:2]
    reference = MaskedLM(model.config)
    reference.load_state_dict(model.state_dict())
    trainer.evaluate = None
    trainer.train()
    losses, counts = [], []
    for serial, indices in enumerate(first):
        example = trainer.collate([trainer.examples[i] for i in indices], serial)
        logits = reference(example["batch"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits, example["labels"], reduction="sum"))
        counts.append(int((example["labels"] != -100).sum()))
    assert counts[0] != counts[1]
    (sum(losses) / sum(counts)).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_bf16_trains_fp32_weights(tmp_path):
    trainer = build(tmp_path, precision="bf16", max_steps=4)
    metrics = trainer.train()
    assert 0 < metrics["loss"] < 10
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.float32}


def test_schedule_is_transformers():
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 7, 50)
    for step in range(50):
        assert rate_factor(step, 7, 50) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_decay_groups_are_transformers(tmp_path):
    from families import model
    from transformers.trainer_pt_utils import get_parameter_names

    theirs = model("bert", "ForMaskedLM")
    decayed = get_parameter_names(theirs, [torch.nn.LayerNorm], ["bias"])
    groups = parameter_groups(theirs, 0.1)
    ids = {id(p) for p in groups[0]["params"]}
    assert {n for n, p in theirs.named_parameters() if id(p) in ids} == {
        n for n, _ in theirs.named_parameters() if n in decayed
    }
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0.0


def test_bad_settings_are_named(tmp_path):
    for options, message in (
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(learning_rate=0.0), "learning_rate must be positive, got 0.0"),
        (dict(warmup=2.0), r"warmup must be a share of the steps in \[0, 1\], got 2.0"),
        (dict(precision="fp8"), "precision must be one of .* got 'fp8'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(str(tmp_path), **options)
    frozen = MaskedLM(
        EncoderConfig(vocab_size=20, hidden_size=8, num_layers=1, num_heads=1)
    ).requires_grad_(False)
    with pytest.raises(ValueError, match="there is nothing to train"):
        Trainer(frozen, TrainConfig(str(tmp_path)), [[1, 2]], [2], lambda examples, step: {})


def test_two_processes_are_one_with_twice_the_micro_batches(tmp_path):
    """Without dropout, two processes of batch 4 end with the weights of one with two micro-batches of 4."""
    settings = dict(max_steps=6, eval_every=3, dropout=0.0)
    build(tmp_path / "one", accumulation=2, **settings).train()
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29613"]
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(tmp_path / "two"), "accumulation=1", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = re.findall(r"\{[^}]*\}", done.stdout)
    assert len(printed) == 2 and printed[0] == printed[1]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5, msg=name)
