"""Signals during training, and two runs in one folder."""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastenc.train.checkpoint import checkpoints, latest_checkpoint
from fastenc.train.interruption import TrainingInterrupted
from fastenc.train.output_lock import NAME, output_lock
from tests.helpers.processes import python
from tests.helpers.training_run import assert_bitwise_equal, build, weights

SIGNALLED = """
import os, sys
from tests.helpers.training_run import build
from fastenc.cli import main
import fastenc.cli.commands as commands
from fastenc.train.loop import Trainer
real = Trainer._optimiser_step
def step(self, batches):
    real(self, batches)
    if self.step == 2:
        os.kill(os.getpid(), int(sys.argv[2]))
Trainer._optimiser_step = step
commands.run = lambda arguments: build(sys.argv[1], save_every=None).train()
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_the_run_goes_on_from(number, tmp_path):
    run = python("-c", SIGNALLED, tmp_path / "cut", int(number))
    error = run.stderr
    assert run.returncode == 128 + number, error
    assert (
        f"{number.name}: training stops after this step with a checkpoint; a second signal stops it at once"
        in error
    )
    step = int(
        re.search(r"stopped at step (\d+) of 21 with the checkpoint .*resume=True", error)[1]
    )
    assert latest_checkpoint(tmp_path / "cut").name == f"checkpoint-{step:08d}" and step == 3
    whole = build(tmp_path / "whole").train()
    assert build(tmp_path / "cut").train(resume=True) == whole
    assert_bitwise_equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.fixture
def default_handler():
    """Of SIGINT, which a shell makes a command in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_stops_at_once(tmp_path, default_handler):
    trainer = build(tmp_path, save_every=None)
    real = trainer._optimiser_step

    def step(batches):
        real(batches)
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    trainer._optimiser_step = step
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, TrainingInterrupted) and not checkpoints(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


HELD = """
import os, signal, sys, time
from pathlib import Path
from fastenc.train.loop import Trainer
from tests.helpers.training_run import build
def step(self, batches):
    Path(sys.argv[2]).write_text(str(os.getpid()))
    while Path(sys.argv[2]).exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
Trainer._optimiser_step = step
build(sys.argv[1]).train()
"""


def test_two_runs_in_one_folder_are_an_error(tmp_path):
    """The first is held in its first step, until a file is removed, and then killed."""
    held = tmp_path / "held"
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(python, "-c", HELD, tmp_path / "run", held)
        while not (held.exists() and held.read_text()) and not run.done():
            time.sleep(0.05)
        try:
            message = rf"output of another run, process {held.read_text()} on \S+, started 20\d\d-"
            with pytest.raises(ValueError, match=message + ".*wait for it"):
                build(tmp_path / "run").train()
            assert not checkpoints(tmp_path / "run")
        finally:
            held.unlink()
    assert run.result().returncode == -signal.SIGKILL
    # The lock file of a killed run blocks nothing.
    assert (tmp_path / "run" / NAME).exists()
    assert "loss" in build(tmp_path / "run").train()
    assert not (tmp_path / "run" / NAME).exists()


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with output_lock(tmp_path / "new"), output_lock(tmp_path / "new"):
        record = json.loads((tmp_path / "new" / NAME).read_text())
        assert record["process"] == os.getpid() and time.strftime("%Y") in record["started"]
    assert not (tmp_path / "new").exists()


def test_resuming_needs_the_folder(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist: check its name"):
        build(tmp_path / "nowhere").train(resume=True)
    (tmp_path / "begun").mkdir()  # left by a run that was killed before its first checkpoint
    assert "loss" in build(tmp_path / "begun", max_steps=1).train(resume=True)


def test_training_stops_after_evaluations_without_a_better_one(tmp_path):
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    settings = dict(max_steps=5, eval_every=1, patience=2)

    def run(folder, **options):
        trainer = build(tmp_path / folder, **(settings | options))
        trainer.evaluate = lambda model: {"loss": next(losses)}
        return trainer, trainer.train(resume=(tmp_path / folder).exists())

    trainer, metrics = run("early")
    assert trainer.step == 4 and metrics == {"loss": 2.0} and trainer.best["step"] == 2
    state = json.loads((tmp_path / "early" / "checkpoint-00000004" / "state.json").read_text())
    assert state["evaluations since best"] == 2
    log = (tmp_path / "early" / "log.jsonl").read_text()
    again, same = run("early")  # its next loss would be better
    assert again.step == 4 and same == metrics
    assert (tmp_path / "early" / "log.jsonl").read_text() == log


def test_training_needs_no_matplotlib(tmp_path):
    code = (
        "import sys\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Missing(MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'matplotlib':\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util, fastenc.train.plot as plot\n"
        "sys.meta_path.insert(0, Missing())\n"
        "plot.find_spec = lambda name: None\n"
        "from tests.helpers.training_run import build\n"
        "build(sys.argv[1], max_steps=2).train()\n"
    )
    done = python("-c", code, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "curves.png").exists()
