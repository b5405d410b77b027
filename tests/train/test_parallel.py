"""Two processes, with replicas or shards, compute what one computes; a run can go on with another number of them."""

import json
import os
import re
import shutil
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastenc.data import write_store
from fastenc.objectives import OBJECTIVES
from fastenc.train import checkpoint as checkpoints
from fastenc.train.log import read_log
from fastenc.train.optimizer_files import read_optimizer
from fastenc.train.processes import TIMEOUT
from tests.helpers.commands import run
from tests.helpers.parallel_runs import start
from tests.helpers.processes import python
from tests.helpers.training_run import (
    assert_bitwise_equal,
    build_objective,
    documents,
    weights,
    word_tokenizer,
)

PARALLEL = ("ddp", "fsdp")
TASKS = (
    "sequence-classification",
    "chunks",
    "token-classification",
    "span-ner",
    "question-answering",
    "sentence-embedding",
    "sparse-embedding",
)
# One process takes two micro-batches a step, two processes take one each. An epoch has an odd number of micro-batches
# (7 of 25 examples), so in its last step one of two processes has none. Dropout is off, because each process would drop
# other units. AdamW's epsilon is far above rounding errors: where a gradient is zero (the bias of keys), AdamW would
# make whole steps of them.
SAME = dict(global_batch_size=8, max_steps=5, dropout=0.0, adam_eps=1e-4)
RUNS = {
    **{name: dict(objective=name, **SAME) for name in OBJECTIVES},
    **{name: dict(task=name, **SAME) for name in TASKS},
}
# What is sharded is the model: one with one part, with two, with a decoder, and with the heads of tasks.
SHARDED = ("mlm", "electra", "span-corruption", "sequence-classification", "question-answering")
EACH_RUN = [*((name, "ddp") for name in RUNS), *((name, "fsdp") for name in SHARDED)]
# Two micro-batches of two processes have the negatives of one that is as large as both.
CONTRASTIVE = {
    name: dict(task=name, max_steps=8, dropout=0.0, adam_eps=1e-4)
    for name in ("sentence-embedding", "sparse-embedding")
}
GATHERED = dict(batch_size=2, global_batch_size=4, gather=True)
DROPS = dict(objective="mlm+nsp", global_batch_size=8, max_steps=6, save_every=2, dropout=0.1)
RESUMED = dict(objective="electra", **SAME)


def folder_of(root, *names):
    folder = root / "-".join(names).replace("+", "_")
    folder.mkdir(exist_ok=True)
    return folder


def run_of(folder):
    """The folder of a run's checkpoints: a task stores its base model beside them."""
    return folder / "run" if (folder / "run").exists() else folder


def consumed(folder, resumed=False):
    """(serial number, examples) of all processes' micro-batches; one that two computed is listed once."""
    files = folder.glob(f"consumed-{resumed:d}-*.json")
    rows = [(s, tuple(indices)) for path in files for s, indices in json.loads(path.read_text())]
    return dict(sorted(set(rows)))


def on_two_processes(*arguments):
    """The (stdout, stderr) of a run on two processes, which find each other by torchrun's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = {**os.environ, **address, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared["CUDA_VISIBLE_DEVICES"] = ""

    def run_rank(rank):
        return python(*arguments, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, timeout=400)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run_rank, "01"))
    for each in done:
        assert each.returncode == 0, each.stderr[-8000:]
    return "".join(each.stdout for each in done), "".join(each.stderr for each in done)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Every run of this file: the first half on one process, all runs on two, the second half on one."""
    root = tmp_path_factory.mktemp("parallel")
    for parallel in PARALLEL:
        start(str(folder_of(root, "one-two", parallel)), die_at=4, **RESUMED)
    runs = []
    for parallel in PARALLEL:
        own = lambda *names, parallel=parallel: str(folder_of(root, *names, parallel))
        runs += [
            (own("two", name), RUNS[name] | {"parallel": parallel})
            for name, way in EACH_RUN
            if way == parallel
        ]
        runs.append((own("one-two"), RESUMED | dict(resume=True, parallel=parallel)))
        runs.append((own("two-one"), RESUMED | dict(die_at=4, parallel=parallel)))
        drops = DROPS | {"parallel": parallel}
        runs.append((own("whole"), drops))
        runs.append((own("cut"), drops | {"die_at": 3}))
        runs.append((own("cut"), drops | {"resume": True}))
        runs.append((own("poisoned"), drops | dict(poison_at=2, eval_every=2)))
        # FSDP has no gradient caching.
        cached = {} if parallel == "ddp" else {"tokens_at_once": None}
        runs += [
            (own("gathered", name), options | GATHERED | cached | {"parallel": parallel})
            for name, options in CONTRASTIVE.items()
        ]
    runs.append((str(folder_of(root, "full")), DROPS | dict(parallel="fsdp", full_disk=True)))
    output, shown = on_two_processes("-m", "tests.helpers.parallel_runs", json.dumps(runs))
    assert "view tensor" not in shown, "FSDP warns of outputs that are views"
    printed = [json.loads(text) for text in re.findall(r'\{"index".*?\]\}', output)]
    assert sorted(one["index"] for one in printed) == [0, 1]
    assert {one["timeout"] for one in printed} == {TIMEOUT.total_seconds()}
    results = printed[0]["results"]
    assert results == printed[1]["results"], "both have the main process's metrics, and the error"
    (root / "full" / "error.txt").write_text(results[-1])
    for parallel in PARALLEL:
        start(str(folder_of(root, "two-one", parallel)), resume=True, **RESUMED)
    return root


@pytest.fixture(scope="module")
def alone(root):
    """The folder of a run on one process, made when a test first needs it."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = folder_of(root, "one", name)
            start(str(made[name]), **RUNS[name])
        return made[name]

    return run


def assert_same_run(one, two):
    """Losses of each step to 1e-5 relative, and weights to 1e-4 relative plus 1e-5: the order of sums differs."""
    logs = [read_log(run_of(folder) / "log.jsonl") for folder in (one, two)]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        for key in (key for key in ours if "_per_" not in key):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-5, abs=1e-6), (ours["step"], key)
    ours, theirs = weights(run_of(one)), weights(run_of(two))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("name", "parallel"), EACH_RUN)
def test_two_processes_are_one_with_twice_the_micro_batches(name, parallel, root, alone):
    two = folder_of(root, "two", name, parallel)
    assert_same_run(alone(name), two)
    assert consumed(two) == consumed(alone(name))


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_gathered_negatives_are_those_of_one_larger_batch(name, root, tmp_path):
    """The last step of an epoch has a single pair, which the second process computes too."""
    start(str(tmp_path), **CONTRASTIVE[name], batch_size=4)
    expected, *others = (
        [line for line in read_log(folder / "run" / "log.jsonl") if "loss" in line]
        for folder in (tmp_path, *(folder_of(root, "gathered", name, each) for each in PARALLEL))
    )
    for log in others:
        assert len(log) == len(expected) == 8
        for one, two in zip(expected, log, strict=True):
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6)


def test_two_processes_pretrain_on_a_store_as_one_does(tmp_path):
    """The process that first needs examples packs them; the main process does so while the other waits."""
    texts = {"en": documents(120), "mt": documents(30)[::-1]}
    store = write_store(tmp_path / "store", texts, word_tokenizer(), shard_characters=4000)
    model = ("--layers", 2, "--hidden", 32, "--heads", 2, "--block-size", 32, "--dropout", 0)
    command = (
        *("pretrain", store.folder, *model, "--replacement", "unigram", "--alpha", 0.5),
        *("--batch-tokens", 128, "--max-steps", 12, "--eval-every", 4, "--adam-eps", 1e-4),
    )
    _, shown = on_two_processes("-m", "fastenc", *command, "-o", tmp_path / "two")
    assert shown.count("tokens_per_s ") == 2, "the main process's lines alone, at steps 10 and 12"
    run(*command, "--accumulation", 2, "-o", tmp_path / "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("name", ["one-two", "two-one"])
def test_a_run_goes_on_with_another_number_of_processes(name, parallel, root, alone):
    folder = folder_of(root, name, parallel)
    assert_same_run(alone("electra"), folder)
    # The run ended after step 4, and its last checkpoint is of step 3: what came after that is computed again.
    first = consumed(folder)
    before = {serial: indices for serial, indices in first.items() if serial < 3 * 2}
    assert len(first) == 7, "an epoch, whose last step has one micro-batch"
    after = consumed(folder, resumed=True)
    assert before | after == consumed(alone("electra")) and not before.keys() & after.keys()
    batches = -(-len(build_objective(folder / "x", "electra").examples) // 4)
    steps = -(-batches // 2)
    epoch = [indices for s, indices in (before | after).items() if s < 2 * steps]
    counts = Counter(index for indices in epoch for index in indices)
    assert set(counts.values()) == {1} and sorted(counts) == list(range(len(counts)))


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_same_number_of_processes_resumes_bit_for_bit(parallel, root):
    whole, cut = (folder_of(root, name, parallel) for name in ("whole", "cut"))
    assert_bitwise_equal(weights(cut), weights(whole))
    keys = ("step", "loss", "eval_loss", "grad_norm")
    logs = [
        [{k: line[k] for k in keys if k in line} for line in read_log(folder / "log.jsonl")]
        for folder in (cut, whole)
    ]
    assert logs[0] == logs[1]
    assert sorted(path.name for path in cut.glob("checkpoint-*")) == sorted(
        path.name for path in whole.glob("checkpoint-*")
    )


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_step_that_is_not_finite_changes_no_shard(parallel, root):
    folder = folder_of(root, "poisoned", parallel)
    # The gradient was not finite before step 3.
    first, last = (weights(checkpoints.folder_of(folder, step)) for step in (4, 6))
    assert_bitwise_equal(first, last)
    whole = folder_of(root, "whole", parallel)
    early, late = (weights(checkpoints.folder_of(whole, step)) for step in (4, 6))
    assert any(not torch.equal(early[name], late[name]) for name in early)


def test_a_disk_full_for_one_process_is_an_error_of_all(root):
    message = (root / "full" / "error.txt").read_text()
    assert re.search(
        r"step 2 could not be written to .*No space left.*no earlier checkpoint", message
    )
    assert not list((root / "full").glob("*checkpoint*"))


def test_moments_are_in_shards_and_weights_are_whole(root):
    folder = checkpoints.folder_of(folder_of(root, "whole", "fsdp"), 6)
    shards = sorted((folder / "optimizer").iterdir())
    assert [path.name for path in shards] == [
        f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)
    ]
    others = [path for path in folder.iterdir() if path.is_file()]
    assert {path.suffix for path in others} == {".safetensors", ".json"}
    rows = []
    for path in shards:
        with safe_open(path, "pt") as file:
            rows.append(file.get_slice("encoder.embeddings.word.weight|exp_avg").get_shape()[0])
    vocabulary = weights(folder)["bert.embeddings.word_embeddings.weight"].shape[0]
    assert rows == [-(-vocabulary // 2), vocabulary // 2]


def earlier_files(folder, shards):
    """Files of the same shards as earlier versions wrote them: rows, in the order of the processes."""
    for number, path in enumerate(shards):
        metadata = {"first rows": "{}"}  # earlier versions wrote it; it is not needed
        name = f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(load_file(path), folder / name, metadata=metadata)


def test_shards_of_earlier_versions_are_read(root, tmp_path):
    folder = shutil.copytree(
        checkpoints.folder_of(folder_of(root, "whole", "fsdp"), 6), tmp_path / "earlier"
    )
    model = build_objective(tmp_path, **DROPS).plain_model
    parameters = dict(model.named_parameters())
    ours = {(name, entry): tensor for name, entry, tensor in read_optimizer(folder, parameters)}
    earlier_files(folder, sorted((folder / "optimizer").iterdir()))
    shutil.rmtree(folder / "optimizer")
    theirs = {(name, entry): tensor for name, entry, tensor in read_optimizer(folder, parameters)}
    assert len(ours) == 3 * len(parameters)
    assert_bitwise_equal(ours, theirs)


def test_bad_input_is_named(root, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'fsdp' shards the weights over several processes, got 1"):
        build_objective(tmp_path, "mlm", parallel="fsdp")
    with pytest.raises(ValueError, match=r"parallel must be one of .*, got 'pp'"):
        build_objective(tmp_path, "mlm", parallel="pp")
    folder = folder_of(root, "whole", "fsdp")
    with pytest.raises(
        ValueError, match=r"micro-batches a step \(accumulation \* processes\)=2, this run has 1"
    ):
        build_objective(folder, **{**DROPS, "global_batch_size": 4}).train(resume=True)
    _, second = sorted((checkpoints.latest_checkpoint(folder) / "optimizer").iterdir())
    second.rename(second.with_name("elsewhere"))
    with pytest.raises(
        ValueError, match=r"is corrupt .*optimizer must hold .* a file is missing.*: remove it, and"
    ):
        build_objective(folder, **DROPS).train(resume=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="got accelerate launch with FSDP, which would shard"):
        build_objective(tmp_path, "mlm")
