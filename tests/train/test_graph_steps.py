"""Training with recorded steps. A recorder that repeats the step replaces CUDA graphs."""

import json
import math

import pytest
import torch

from fastenc.train import optimizer_step
from tests.helpers.recording import Repeat
from tests.helpers.training_run import build, build_objective, weights


@pytest.fixture
def recorder(monkeypatch):
    repeat = Repeat()
    monkeypatch.setattr(optimizer_step, "graph_recorder", lambda device, what: repeat)
    return repeat


def log_of(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("tokens_per_s", "steps_per_day")}
        for line in lines
    ]


def assert_same_runs(ours, theirs, tolerance=2e-3):
    for a, b in zip(log_of(ours), log_of(theirs), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert math.isclose(value, b[name], rel_tol=tolerance, abs_tol=1e-4), (name, a, b)
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "options", [{"accumulation": 1}, {"accumulation": 2}, {"precision": "bf16"}]
)
def test_a_run_of_recorded_steps_is_that_without(tmp_path, recorder, options):
    # A large eps: where a gradient is 0, Adam scales rounding noise up to whole steps.
    options = {"adam_eps": 1e-3, "epochs": 2, "layer_decay": 0.9, **options}
    build(tmp_path / "graph", graph=True, **options).train()
    build(tmp_path / "plain", **options).train()
    assert recorder.recorded > 0
    tolerance = 2e-2 if "precision" in options else 2e-3
    assert_same_runs(tmp_path / "graph", tmp_path / "plain", tolerance)


def test_a_run_resumes_where_it_stopped(tmp_path, recorder):
    options = {"graph": True, "epochs": 2, "adam_eps": 1e-3}
    build(tmp_path / "whole", **options).train()
    trainer = build(tmp_path / "stopped", **options)
    save = trainer._save

    def stop():
        save()
        raise KeyboardInterrupt

    trainer._save = stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    build(tmp_path / "stopped", **options).train(resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    # The steps are the same as without graphs, except for rounding, so a run may go on with or without them.
    assert "graph" not in trainer.fingerprint


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, recorder):
    trainer = build(tmp_path, graph=True)
    with torch.no_grad():
        trainer.plain_model.head.bias[7] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss must be finite, got nan at step 1"):
        trainer.train()


def test_on_a_cpu_the_steps_run_as_they_are(tmp_path):
    options = {"epochs": 1, "adam_eps": 1e-3}
    build(tmp_path / "graph", graph=True, **options).train()
    build(tmp_path / "plain", **options).train()
    assert_same_runs(tmp_path / "graph", tmp_path / "plain")


@pytest.mark.parametrize("objective", ["electra", "distill", "span"])
def test_objectives_that_count_padding_are_refused_before_the_run(tmp_path, objective):
    with pytest.raises(ValueError, match="loss must be a mean over labelled items, got this"):
        build_objective(tmp_path, objective, graph=True)


def test_several_processes_are_refused(tmp_path):
    step = build(tmp_path).optimizer_step
    step.processes = 2
    with pytest.raises(ValueError, match="graph=True needs a single process, got 2 processes"):
        step._record()
