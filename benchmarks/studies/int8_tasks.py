"""MiniLM fine-tuned in float32, then evaluated in float32 and in int8: scores, and answers that changed.

python -m benchmarks.studies.int8_tasks [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

An answer is the class of a text, the tag of a word, or the score of a pair. A changed score has no number; the largest
difference stands for it. The epoch is chosen on dev; the figures are of test, or of dev where there is no test. Each
training has a process of its own, and its rows are written when it ends. With --limit only this number of examples of
each file is read, and nothing is written.
"""

import tempfile
from dataclasses import replace
from typing import Any

import torch

import fastenc
from benchmarks._process import isolated
from benchmarks._results import read_cases, write
from benchmarks.studies._runs import training_options
from benchmarks.studies.task_sets import SETS
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SequenceClassification, Task, TokenClassification
from fastenc.train import TrainConfig, fine_tuning_lr, task_trainer

DEFAULT = ("sst2-5000", "wnut17", "stsb")


def measure(name: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"float32", "int8"}: {"metric", "score"}; int8 has "answers" with "changed" or "largest_difference", too."""
    chosen = SETS[name]
    train, dev, test = chosen.read(limit)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(scratch, epochs=epochs, seed=seed)
        config = replace(
            config, learning_rate=fine_tuning_lr(384, steps=config.steps_over(len(train)))
        )
        model = chosen.task.load(minilm_folder(), train)
        trainer = task_trainer(chosen.task, model, train, config, dev=dev, metric=chosen.metric)
        trainer.train()
    model.eval()
    data = dev if test is None else test
    rows, answers = {}, {}
    for dtype in ("float32", "int8"):
        if dtype == "int8":
            fastenc.freeze(model, dtype="int8")
        predictions = chosen.task.predict(model, data)
        score = chosen.task.score(model, data, predictions)[chosen.metric]
        rows[dtype] = {"metric": chosen.metric, "score": score}
        answers[dtype] = answers_of(chosen.task, predictions)
    pairs = list(zip(answers["float32"], answers["int8"], strict=True))
    rows["int8"]["answers"] = len(pairs)
    if isinstance(pairs[0][0], float):
        rows["int8"]["largest_difference"] = max(abs(a - b) for a, b in pairs)
    else:
        rows["int8"]["changed"] = sum(a != b for a, b in pairs)
    return rows


def answers_of(task: Task, predictions: Any) -> list[str] | list[int] | list[float]:
    if isinstance(task, TokenClassification):
        return [tag for each in predictions for tag in each.tags]
    regression = isinstance(task, SequenceClassification) and task.regression
    return (predictions.flatten() if regression else predictions.argmax(1)).tolist()


def main() -> None:
    options = training_options(__doc__, "SET", SETS, DEFAULT)
    cases = {} if options.limit else read_cases("int8_tasks")
    for seed in options.seeds:
        for name in options.chosen:
            case = f"{SETS[name].title}, {options.epochs} epochs, seed {seed}"
            if case in cases:
                continue
            rows = isolated(measure, name, seed, options.epochs, options.limit)
            rows.pop("peak_memory")
            cases[case] = rows
            print(case, rows, flush=True)
            if options.limit is None:
                write("int8_tasks", cases)


if __name__ == "__main__":
    main()
