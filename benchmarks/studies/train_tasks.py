"""MiniLM fine-tuned by fastenc and by transformers' Trainer with the same settings: score, time and memory.

The Trainer runs transformers' own model and the same model patched by fastenc, with pytorch-crf's CRF where ours has a
CRF.

python -m benchmarks.studies.train_tasks [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

Batches and their order, learning rate, warm-up, weight decay and clipping are the same; dropout and the classifier's
initial weights are each library's own. There is one evaluation an epoch, or four in SST-2's long epochs; the best on
dev counts, and the score is of test where there is one. Each run has a process of its own; its time (training with
evaluations) and peak memory stand beside the score. Runs with stored results are not repeated. With --limit only this
number of examples of each file is read, and nothing is written.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastenc
from benchmarks._process import Stopwatch
from benchmarks.studies._runs import collect, runs_on_sets, training_options
from benchmarks.studies._trainer import peer_of, transformers_trainer
from benchmarks.studies.task_sets import SETS, TaskSet
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import QuestionAnswering, SpanNer, Task, TokenClassification
from fastenc.train import TrainConfig, fine_tuning_lr, task_trainer

OURS, THEIRS = "fastenc", "transformers Trainer"
OURS_CRF, THEIRS_CRF = "fastenc, CRF", "transformers Trainer, pytorch-crf"
PATCHED = "transformers Trainer, fastenc.patch"


def providers(chosen: TaskSet) -> tuple[str, ...]:
    if isinstance(chosen.task, SpanNer):  # transformers has no such model to patch
        return (OURS, THEIRS)
    if isinstance(chosen.task, TokenClassification) and chosen.metric == "f1":
        return (OURS, OURS_CRF, THEIRS, THEIRS_CRF, PATCHED)
    return (OURS, THEIRS, PATCHED)


def one_run(name: str, provider: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"dev", "test" (if there is one), "seconds", "cpu_seconds"} of a provider on a set."""
    chosen = SETS[name]
    train, dev, test = chosen.read(limit)
    scratch = tempfile.mkdtemp()
    config = TrainConfig(scratch, epochs=epochs, seed=seed)
    rate = fine_tuning_lr(384, steps=config.steps_over(len(train)))
    config = replace(config, learning_rate=rate)
    with_crf = provider in (OURS_CRF, THEIRS_CRF)
    task = replace(chosen.task, crf=True) if with_crf else chosen.task
    data = (train, dev, test, chosen.metric, config)
    if provider in (OURS, OURS_CRF):
        result = ours(task, *data)
    else:
        result = theirs(task, *data, fastenc.patch if provider == PATCHED else None)
    shutil.rmtree(scratch)
    if isinstance(chosen.task, QuestionAnswering):  # SQuAD's own scores are percentages
        result |= {split: result[split] / 100 for split in ("dev", "test") if split in result}
    return result


def ours(
    task: Task, train, dev, test, metric: str, config: TrainConfig, start: Path | None = None
) -> dict:
    """Fine-tune a checkpoint, by default MiniLM, with fastenc: see :func:`one_run`."""
    torch.manual_seed(config.seed)
    model = task.load(start or minilm_folder(), train)
    trainer = task_trainer(task, model, train, config, dev=dev, metric=metric)
    with Stopwatch() as watch:
        result = {"dev": trainer.train()[metric]}
    if test is not None:
        result["test"] = task.evaluate(model, test, task.encode(test, model))[metric]
    return result | watch.times


def theirs(
    task: Any,
    train,
    dev,
    test,
    metric: str,
    config: TrainConfig,
    wrap: Callable | None = None,
    start: Path | None = None,
) -> dict:
    """Fine-tune a checkpoint, by default MiniLM, with transformers' Trainer; ``wrap`` may change the model first. See
    :func:`one_run`."""
    import transformers

    transformers.set_seed(config.seed)
    start = start or minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    peer = peer_of(task)(task, train, tokenizer, start)
    model = peer.model()
    trainer = transformers_trainer(
        wrap(model) if wrap else model,
        config,
        peer.rows(train),
        peer.rows(dev),
        peer.collator(),
        lambda prediction: peer.score(dev, prediction),
        metric,
    )
    with Stopwatch() as watch:
        trainer.train()
    trainer.compute_metrics = None  # it is for dev
    peer.calibrate(dev, trainer.predict(peer.rows(dev)))
    measure = lambda data: peer.score(data, trainer.predict(peer.rows(data)))[metric]
    result = {"dev": measure(dev)}
    if test is not None:
        result["test"] = measure(test)
    return result | watch.times


def main() -> None:
    options = training_options(__doc__, "SET", SETS, list(SETS))
    collect("train_tasks", runs_on_sets(options, one_run, providers), options.limit)


if __name__ == "__main__":
    main()
