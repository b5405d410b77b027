"""MiniLM adapted in every way: trained parameters, score, time and memory.

python -m benchmarks.train_adapted [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

Each way has its own default learning rate. The epoch is chosen on dev, the score is of test where there is one. Each
run has a process of its own; results that are there already are kept, and with --limit nothing is written.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks._harness import read_cases, write
from benchmarks._process import Stopwatch, isolated
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sets", nargs="*", default=["sst2-5000", "rte"], metavar="SET")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    if unknown := set(options.sets) - set(SETS):
        parser.error(f"SET must be of {', '.join(SETS)}, got {', '.join(sorted(unknown))}")
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    cases = {} if options.limit else read_cases("train_adapted")
    for seed in options.seeds:
        for name in options.sets:
            case = f"{SETS[name].title}, {options.epochs} epochs, seed {seed}"
            rows = cases.setdefault(case, {})
            for way in WAYS:
                if way in rows:
                    continue
                row = isolated(one_run, name, way, seed, options.epochs, options.limit)
                rows[way] = {"metric": SETS[name].metric, **row}
                if options.limit is None:
                    write("train_adapted", cases)
                shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
                print(f"{case}  {way:22} {shown}", flush=True)


if __name__ == "__main__":
    main()
