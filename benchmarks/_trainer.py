"""transformers' Trainer with fastenc's settings, on the same batches in the same order."""

from collections.abc import Callable
from typing import Any

import torch

from fastenc.data import BatchSampler
from fastenc.train import TrainConfig


class EpochAfterEpoch:
    """A BatchSampler as torch's DataLoader wants it: each iteration is the next epoch."""

    def __init__(self, sampler: BatchSampler):
        self.sampler, self.epoch = sampler, -1

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self):
        self.epoch += 1
        return self.sampler.epoch(self.epoch)


def transformers_trainer(
    model: Any,
    config: TrainConfig,
    train: list[dict],
    dev: list[dict],
    collate: Callable,
    compute_metrics: Callable,
    metric: str,
) -> Any:
    """A Trainer that evaluates every epoch and keeps the best by ``metric``; rows have ``input_ids`` and labels."""
    import transformers

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
        metric_for_best_model=metric,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    lengths = [len(row["input_ids"]) for row in train]
    sampler = BatchSampler(lengths, config.batch_size, shuffle=True, seed=config.seed)

    class SameBatches(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(
                train, batch_sampler=EpochAfterEpoch(sampler), collate_fn=self.data_collator
            )

    return SameBatches(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
