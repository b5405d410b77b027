"""Runs killed by SIGKILL and resumed."""

import json
import signal

import pytest

from fastenc.adapt import add_adaptation
from fastenc.data import LabelledData
from fastenc.models.adapters.adaptation_methods import Lora
from fastenc.tasks import TASKS
from fastenc.train import TrainConfig, task_trainer
from fastenc.train import checkpoint as checkpoints
from fastenc.train.log import read_log
from tests.helpers.processes import python
from tests.helpers.training_run import (
    assert_bitwise_equal,
    build,
    small_model,
    weights,
    word_tokenizer,
)

LOOP, CHECKPOINT = "fastenc.train.loop:Trainer", "fastenc.train.checkpoint"
# (owner, function, call): the run dies at the start of this call. Checkpoints: steps 3, 6, 7, 9, 12, 14, 15, 18, 21.
DEATHS = [(LOOP, "_optimiser_step", step) for step in (1, 4, 13)] + [
    (CHECKPOINT, "write_optimizer", 1),  # half of the first checkpoint is written
    (CHECKPOINT, "write_optimizer", 4),
    (CHECKPOINT, "flush", 20),  # a checkpoint is written, but has not been renamed
    (CHECKPOINT, "remove_old", 9),  # the checkpoint is complete, but nothing refers to it yet
    (CHECKPOINT, "remove_unfinished", 6),  # an old checkpoint is about to be deleted
    (LOOP, "_finish", 1),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, build(folder).train()


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    """A folder for each death. One process imports everything and forks all of them."""
    folders = {death: tmp_path_factory.mktemp("killed") for death in DEATHS}
    code = (
        "import accelerate, json, sys, matplotlib.backends.backend_agg, torch._dynamo\n"
        "from tests.helpers.training_run import killed\n"
        "print([killed(*run) for run in json.loads(sys.argv[1])])"
    )
    runs = json.dumps([[str(folder), *death] for death, folder in folders.items()])
    done = python("-c", code, runs)
    assert json.loads(done.stdout) == [signal.SIGKILL] * len(DEATHS), done.stderr[-2000:]
    return folders


def test_others_may_read_a_checkpoint_if_they_may_read_new_files(uninterrupted, tmp_path):
    (tmp_path / "new").write_text("")
    files = {path.name: path.stat().st_mode for path in uninterrupted[0].glob("checkpoint-*/*")}
    assert {"optimizer.safetensors", "random.safetensors", "model.safetensors"} <= files.keys()
    assert {*files.values()} == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: f"{death[1]}-{death[2]}")
def test_killed_and_resumed_gives_the_same_weights(uninterrupted, killed_runs, death):
    """Bit for bit, with the same best checkpoint and with each step once in the log."""
    folder, (expected_folder, expected) = killed_runs[death], uninterrupted
    for path in checkpoints.checkpoints(folder):
        weights(path)  # each one is complete
    assert build(folder).train(resume=True) == expected
    assert_bitwise_equal(weights(folder), weights(expected_folder))
    lines = [read_log(f / "log.jsonl") for f in (folder, expected_folder)]
    for key in ("loss", "eval_loss", "learning_rate"):
        ours, theirs = ([(line["step"], line[key]) for line in run if key in line] for run in lines)
        assert ours == theirs
    names = [sorted(path.name for path in f.iterdir()) for f in (folder, expected_folder)]
    assert names[0] == names[1], "the kill left something behind"


def question(answer, start):
    answers = {"text": [answer], "answer_start": [start]}
    row = {"id": "a", "question": "who ?", "context": "the cat sat", "answers": answers}
    return json.dumps(row) + "\n"


# Task → options, name of the file, two contents that differ in labels alone.
OTHER_LABELS = {
    "sequence-classification": (
        {},
        "d.tsv",
        "sentence\tlabel\na cat\t1\na dog\t0\nthe mat\t0\na cat\t1\n",
        "sentence\tlabel\na cat\t1\na dog\t1\nthe mat\t0\na cat\t0\n",
    ),
    "token-classification": ({}, "d.conll", "the O\ncat B-X\n", "the B-X\ncat O\n"),
    "span-ner": ({}, "d.conll", "the O\ncat B-X\n", "the B-X\ncat O\n"),
    "question-answering": ({"stride": 4}, "d.jsonl", question("cat", 4), question("sat", 8)),
    "sentence-embedding": (
        {"similarity": "score"},
        "d.tsv",
        "sentence1\tsentence2\tscore\na\tb\t1\nc\td\t0\n",
        "sentence1\tsentence2\tscore\na\tb\t1\nc\td\t0.5\n",
    ),
    "rerank": (
        {},
        "d.tsv",
        "query\tdocument\tlabel\na\tcat\t1\na\tdog\t0\n",
        "query\tdocument\tlabel\na\tcat\t0\na\tdog\t1\n",
    ),
}


@pytest.mark.parametrize("task", OTHER_LABELS)
def test_a_run_is_not_resumed_with_other_labels(task, tmp_path):
    options, name, one, other = OTHER_LABELS[task]
    small_model("mlm", word_tokenizer()).save_pretrained(tmp_path / "base")
    chosen = TASKS[task](**options)
    config = TrainConfig(str(tmp_path / "run"), max_steps=1)

    def trainer(text):
        (tmp_path / name).write_text(text)
        data = chosen.read(tmp_path / name)
        return task_trainer(chosen, chosen.load(tmp_path / "base", data), data, config)

    trainer(one).train()
    with pytest.raises(ValueError, match="was written with train examples='checksum"):
        trainer(other).train(resume=True)
    trainer(one).train(resume=True)


@pytest.mark.parametrize(
    "other", [Lora(2, alpha=8.0), Lora(2, alpha=4.0, targets=("key", "up")), None]
)
def test_a_run_is_not_resumed_with_another_adaptation(other, tmp_path):
    small_model("mlm", word_tokenizer()).save_pretrained(tmp_path / "base")
    task = TASKS["sequence-classification"]()
    data = LabelledData(["a cat", "a dog"], [0, 1], ["no", "yes"])
    config = TrainConfig(str(tmp_path / "run"), max_steps=1)

    def trainer(adaptation):
        model = task.load(tmp_path / "base", data)
        if adaptation is not None:
            add_adaptation(model, adaptation)
        return task_trainer(task, model, data, config)

    one = Lora(2, alpha=4.0, targets=("query", "up"))
    trainer(one).train()
    with pytest.raises(ValueError, match=r"was written with adaptation=.Lora\(rank=2, alpha=4.0"):
        trainer(other).train(resume=True)
    trainer(one).train(resume=True)
