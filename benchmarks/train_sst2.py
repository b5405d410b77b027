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
from fastenc.data import BatchSampler, read_labelled
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


class EpochAfterEpoch:
    """A BatchSampler as torch's DataLoader wants it: each iteration is the next epoch."""

    def __init__(self, sampler: BatchSampler):
        self.sampler, self.epoch = sampler, -1

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self):
        self.epoch += 1
        return self.sampler.epoch(self.epoch)


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

    arguments = transformers.TrainingArguments(
        config.output_dir,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup,  # below 1: a share of the steps
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    train_rows = rows(train)
    sampler = BatchSampler(
        [len(row["input_ids"]) for row in train_rows],
        config.batch_size,
        shuffle=True,
        seed=config.seed,
    )

    class SameBatches(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(
                train_rows, batch_sampler=EpochAfterEpoch(sampler), collate_fn=self.data_collator
            )

    trainer = SameBatches(
        model,
        arguments,
        train_dataset=train_rows,
        eval_dataset=rows(dev),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())
        },
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
