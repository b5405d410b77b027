"""What a run reports about its speed, and which trackers receive its log."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from fastenc.train.log import read_log
from fastenc.train.run_report import duration
from fastenc.train.step_statistics import StepStatistics
from tests.helpers.training_run import build


def run(folder, end=None, **options):
    """Train, or resume if there is a checkpoint; ``end``: the step at which the run dies."""
    trainer = build(folder, max_steps=8, eval_every=4, save_every=None, **options)
    step = trainer._optimiser_step

    def die(window):
        if trainer.step == end:
            raise KeyboardInterrupt
        step(window)

    trainer._optimiser_step = die
    if end is None:
        return trainer.train(resume=folder.exists())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return None


def test_the_log_has_tokens_per_second_and_steps_per_day(tmp_path):
    run(tmp_path)
    trainer = build(tmp_path / "other")
    lines = [line for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    for line, window in zip(lines, trainer.schedule.batches_from(0), strict=False):
        tokens = sum(len(trainer.examples[index]) for batch in window for index in batch)
        seconds = 86400 / line["steps_per_day"]
        assert line["tokens_per_s"] * seconds == pytest.approx(tokens)
    assert len(lines) == 8


def test_a_line_has_the_mean_loss_of_its_steps_and_the_last_norm():
    statistics = StepStatistics()
    for rows in ([(1.0, 4.0), (3.0, 2.0)], [(5.0, 7.0), (9.0, 6.0)]):
        for step, (loss, norm) in enumerate(rows, 1):
            values = [loss, norm, 10.0, 0.0, 2 * loss]
            statistics.add(step, ["mlm"], torch.tensor(values, dtype=torch.float64))
        assert statistics.read() == [(step, *row) for step, row in enumerate(rows, 1)]
        line = statistics.close()
        mean = sum(loss for loss, _ in rows) / 2
        assert (line["loss"], line["mlm"]) == (mean, 2 * mean)
        assert line["grad_norm"] == rows[-1][1]


def test_a_time_has_its_two_largest_units():
    times = {12: "12s", 310: "5m10s", 3659: "1h00m", 12_000: "3h20m", 90_060: "25h01m"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_tensorboard_goes_on_with_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, end=6, track=("tensorboard",))
    run(tmp_path, track=("tensorboard",))
    events = EventAccumulator(str(tmp_path / "fastenc")).Reload()
    lines = read_log(tmp_path / "log.jsonl")
    for key in ("loss", "eval_loss", "steps_per_day", "learning_rate"):
        scalars = [(event.step, event.value) for event in events.Scalars(key)]
        expected = [(line["step"], line[key]) for line in lines if key in line]
        assert [step for step, _ in scalars] == [step for step, _ in expected]
        assert [v for _, v in scalars] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_wandb_goes_on_with_a_resumed_run(tmp_path, monkeypatch):
    """A stand-in replaces the library, which needs an account; it records what accelerate's tracker passes."""
    tracking = pytest.importorskip("accelerate.tracking")
    started, logged = [], []

    def init(**options):
        started.append(options)
        log = lambda values, step: logged.append((step, values))
        return SimpleNamespace(log=log, finish=lambda: logged.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.WANDB])
    run(tmp_path, end=6, track=("wandb",))
    assert logged.pop() == "finished" and [step for step, _ in logged] == [1, 2, 3, 4, 4, 5, 6]
    logged.clear()
    run(tmp_path, track=("wandb",))
    assert logged.pop() == "finished" and [step for step, _ in logged] == [5, 6, 7, 8, 8]
    first, second = started
    assert first["project"] == "fastenc" and first["name"] == tmp_path.name
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert first["config"]["learning_rate"] == 1e-2
    run(tmp_path / "another", track=("wandb",))
    assert started[2]["id"] != first["id"]


def test_a_tracker_that_is_unknown_or_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="track must be among tensorboard, wandb, got 'tensorbord'"
    ):
        build(tmp_path, track=("tensorbord",))
    if find_spec("wandb") is None:
        with pytest.raises(ImportError, match=r"pip install 'fastenc\[wandb\]'"):
            build(tmp_path, track=("wandb",))
    assert not any(tmp_path.iterdir())
