"""MiniLM adapted in every way: number of trained parameters, score, time and memory.

python -m benchmarks.studies.train_adapted [SET ...] [--seeds 0 1 2] [--epochs N] [--limit N]    (needs FASTENC_DATA)

Each way has its own default learning rate. fastenc's LoRA stands beside the PEFT library's under transformers' Trainer,
with the same rank, scale, targets, learning rate and batches. (PEFT's prefixes compute the same as ours, and its
prompts stand before the embeddings' norm, so neither is compared.) The epoch is chosen on dev; the score is of test
where there is one. Each run has a process of its own. Stored results are kept; with --limit nothing is written.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks._process import Stopwatch
from benchmarks.studies._runs import collect, runs_on_sets, training_options
from benchmarks.studies.task_sets import SETS, TaskSet
from benchmarks.studies.train_tasks import theirs
from fastenc.adapt import Lora, add_adaptation, freeze_encoder, trained_parameters
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models.adapters.adaptation_methods import METHODS
from fastenc.train import TrainConfig, fine_tuning_lr, task_trainer

FULL, LOWER, FEATURES = "full", "freeze 4 of 6 layers", "features"
DECAYING, DECAY = "layer-wise rates, each 0.8 of the one above", 0.8
PEFT_LORA = "lora, PEFT and transformers Trainer"
WAYS = (FULL, LOWER, DECAYING, *METHODS, FEATURES, PEFT_LORA)


def one_run(name: str, way: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"trained", "dev", "test" (if there is one), "seconds", "cpu_seconds"} of a way on a set."""
    chosen = SETS[name]
    method = "lora" if way == PEFT_LORA else way
    rate = fine_tuning_lr(384, method if method in (*METHODS, FEATURES) else None)
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(
            scratch,
            epochs=epochs,
            seed=seed,
            learning_rate=rate,
            layer_decay=DECAY if way == DECAYING else 1.0,
        )
        if way == PEFT_LORA:
            return peft_lora(chosen, limit, config)
        return ours(chosen, way, limit, config)


def ours(chosen: TaskSet, way: str, limit: int | None, config: TrainConfig) -> dict:
    train, dev, test = chosen.read(limit)
    torch.manual_seed(config.seed)
    model = chosen.task.load(minilm_folder(), train)
    if way in METHODS:
        add_adaptation(model, METHODS[way]())
    elif way in (LOWER, FEATURES):
        freeze_encoder(model, 4 if way == LOWER else None)
    features = Path(config.output) / "features" if way == FEATURES else None
    result = {"trained": trained_parameters(model)[0]}
    with Stopwatch() as watch:  # the features are computed within
        arguments = dict(dev=dev, metric=chosen.metric, features=features)
        result["dev"] = task_trainer(chosen.task, model, train, config, **arguments).train()[
            chosen.metric
        ]
    if test is not None:
        scores = chosen.task.evaluate(model, test, chosen.task.encode(test, model))
        result["test"] = scores[chosen.metric]
    return result | watch.times


def peft_lora(chosen: TaskSet, limit: int | None, config: TrainConfig) -> dict:
    import peft

    lora = Lora()
    same = dict(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    trained = []

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", **same))
        trained.append(trained_parameters(wrapped)[0])
        return wrapped

    scores = theirs(chosen.task, *chosen.read(limit), chosen.metric, config, wrap)
    return {"trained": trained[0], **scores}


def main() -> None:
    options = training_options(__doc__, "SET", SETS, ["sst2-5000", "rte"])
    collect("train_adapted", runs_on_sets(options, one_run, lambda _: WAYS), options.limit)


if __name__ == "__main__":
    main()
