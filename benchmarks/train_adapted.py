"""MiniLM adapted in every way: trained parameters, score, time and memory.

python -m benchmarks.train_adapted [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

Each way has its own default learning rate. The epoch is chosen on dev, the score is of test where there is one. Each
run has a process of its own; results that are there already are kept, and with --limit nothing is written.
"""

import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks._process import Stopwatch
from benchmarks._runs import collect, runs_on_sets, training_options
from benchmarks.task_sets import SETS
from fastenc.adapt import add_adaptation, freeze_encoder, trained_parameters
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models.adaptations import METHODS
from fastenc.train import TrainConfig, fine_tuning_rate, task_trainer

FULL, LOWER, FEATURES = "full", "freeze 4 of 6 layers", "features"
WAYS = (FULL, LOWER, *METHODS, FEATURES)


def one_run(name: str, way: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"trained", "dev", "test" (where there is one), "seconds", "cpu_seconds"} of a way on a set."""
    chosen = SETS[name]
    train, dev, test = chosen.read(limit)
    scratch = tempfile.mkdtemp()
    rate = fine_tuning_rate(384, way if way in (*METHODS, FEATURES) else None)
    config = TrainConfig(scratch, epochs=epochs, seed=seed, learning_rate=rate)
    torch.manual_seed(seed)
    model = chosen.task.load(minilm_folder(), train)
    if way in METHODS:
        add_adaptation(model, METHODS[way]())
    elif way != FULL:
        freeze_encoder(model, 4 if way == LOWER else None)
    features = Path(scratch) / "features" if way == FEATURES else None
    result = {"trained": trained_parameters(model)[0]}
    with Stopwatch() as watch:  # the features are computed within
        arguments = dict(dev=dev, metric=chosen.metric, features=features)
        result["dev"] = task_trainer(chosen.task, model, train, config, **arguments).train()[
            chosen.metric
        ]
    if test is not None:
        scores = chosen.task.evaluate(model, test, chosen.task.encode(test, model))
        result["test"] = scores[chosen.metric]
    shutil.rmtree(scratch)
    return result | watch.times


def main() -> None:
    options = training_options(__doc__, "SET", SETS, ["sst2-5000", "rte"])
    collect("train_adapted", runs_on_sets(options, one_run, lambda _: WAYS), options.limit)


if __name__ == "__main__":
    main()
