"""MiniLM fine-tuned on SST-2 with fastenc's defaults, and by transformers' Trainer with the same settings.

python -m benchmarks.train_sst2 [--epochs N] [--seeds S ...]    (needs FASTENC_DATA; about an hour a seed)

Both train on the 67,349 phrases of the training set and are measured on the development set; batches and their order,
learning rate, warm-up, weight decay and clipping are the same, dropout and the classifier's first weights are each
library's own. Writes the accuracies; for speed see bench_mlm_step.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks._harness import write
from benchmarks._trainer import transformers_trainer
from fastenc.data import read_labelled
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SequenceClassification
from fastenc.train import TrainConfig, fine_tuning_rate, task_trainer

MAX_LENGTH = 128


def ours(train, dev, config: TrainConfig) -> dict:
    torch.manual_seed(config.seed)
    task = SequenceClassification(max_length=MAX_LENGTH)
    model = task.load(minilm_folder(), train)
    metrics = task_trainer(task, model, train, config, dev=dev).train()
    return {"accuracy": metrics["accuracy"]}


def theirs(train, dev, config: TrainConfig) -> dict:
    import transformers

    transformers.set_seed(config.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=len(train.label_names)
    )

    def rows(data):
        encoded = tokenizer(data.texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        return [
            {"input_ids": ids, "labels": label}
            for ids, label in zip(encoded, data.labels, strict=True)
        ]

    accuracy = lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())}
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers_trainer(
        model, config, rows(train), rows(dev), collate, accuracy, "accuracy"
    )
    trainer.train()
    return {"accuracy": trainer.evaluate()["eval_accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    folder = Path(os.environ["FASTENC_DATA"]) / "sst2"
    train = read_labelled(folder / "train.tsv.gz")
    dev = read_labelled(folder / "dev.tsv.gz", label_names=train.label_names)
    scratch = tempfile.mkdtemp()
    cases = {}
    for seed in options.seeds:
        config = lambda name: TrainConfig(
            f"{scratch}/{seed}/{name}",
            epochs=options.epochs,
            seed=seed,
            learning_rate=fine_tuning_rate(384),
        )
        case = f"dev accuracy, {options.epochs} epochs, seed {seed}"
        cases[case] = {
            "fastenc": ours(train, dev, config("fastenc")),
            "transformers Trainer": theirs(train, dev, config("transformers")),
        }
        write("train_sst2", cases)
        for name, row in cases[case].items():
            print(f"    {name:22} accuracy {row['accuracy']:.4f}")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
