"""Two models trained side by side, from the same weights on the same batches."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fastenc.data import BatchSampler, full_sentence_blocks, read_texts, train_tokenizer
from fastenc.models import EncoderConfig, LossTerm
from fastenc.objectives import Collator
from fastenc.objectives.loss_terms import count_items, weighted_sum
from fastenc.train import TrainConfig
from fastenc.train.optimizer import build_optimizer, lr_factor

BLOCK, EVERY = 128, 50


class Side(NamedTuple):
    """A model, and the parts of its loss on a collator's example."""

    model: nn.Module
    parts: Callable[[dict[str, Any]], dict[str, LossTerm]]


def corpus() -> tuple[Any, list, list]:
    """A tokenizer trained on wikipedia_en, training blocks and held-out blocks."""
    documents, held_out = wikipedia()
    tokenizer = train_tokenizer(documents, vocab_size=8000)
    blocks = (full_sentence_blocks(texts, tokenizer, BLOCK) for texts in (documents, held_out))
    return tokenizer, *blocks


def wikipedia() -> tuple[list[str], list[str]]:
    """Articles to train on, and held-out ones."""
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    folder = Path(os.environ["FASTENC_DATA"]) / "wikipedia_en"
    return read_texts(folder / "train.txt.gz")[:2500], read_texts(folder / "valid.txt.gz")[:60]


def small_config(vocabulary: int, width: int = 256, **changes: Any) -> EncoderConfig:
    """4 layers."""
    sizes = dict(hidden_size=width, num_layers=4, num_heads=4, intermediate_size=4 * width)
    return EncoderConfig(vocab_size=vocabulary, max_positions=BLOCK, **{**sizes, **changes})


def padded(example: dict[str, Any]) -> dict[str, Any]:
    """The same batch as Hugging Face takes it."""
    batch = example["batch"]
    positions, shape = batch.padded_indices()

    def pad(values: torch.Tensor, padding: int) -> torch.Tensor:
        return (
            values.new_full(shape, padding).flatten().index_copy(0, positions, values).view(shape)
        )

    return {
        "input_ids": pad(batch.input_ids, 0),
        "attention_mask": pad(torch.ones_like(batch.input_ids), 0),
        "labels": pad(example["labels"], -100),
    }


def train_both(
    sides: dict[str, Side],
    blocks: Sequence[Any],
    collator: Collator,
    held_out: Sequence[Any],
    held_out_collator: Collator,
    steps: int,
    batch_size: int,
) -> dict[str, dict[str, list]]:
    """Steps of AdamW with linear warm-up and decay.

    Returns: {name: {"curve": [(step, held-out loss)], "training": each step's loss}}.
    """
    config = TrainConfig("unused", max_steps=steps, learning_rate=1e-3, warmup=0.1)
    optimizers = {name: build_optimizer(side.model, config) for name, side in sides.items()}
    sampler = BatchSampler([len(block) for block in blocks], batch_size, shuffle=True)
    batches = (indices for epoch in range(10**6) for indices in sampler.epoch(epoch))
    rows: dict[str, dict[str, list]] = {name: {"curve": [], "training": []} for name in sides}
    for step in range(steps + 1):
        if step % EVERY == 0 or step == steps:
            for name, side in sides.items():
                loss = held_out_loss(side, held_out, held_out_collator)
                rows[name]["curve"].append((step, loss))
                print(f"step {step:5}: {name} {loss:.4f}", flush=True)
        if step == steps:
            break
        example = collator([blocks[i] for i in next(batches)], step)
        for name, (model, parts) in sides.items():
            model.train()
            loss = weighted_sum(parts(example))
            loss.backward()
            rows[name]["training"].append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for group in optimizers[name].param_groups:
                group["lr"] = config.learning_rate * lr_factor(step, steps // 10, steps)
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
    return rows


@torch.inference_mode()
def held_out_loss(side: Side, held_out: Sequence[Any], collator: Collator) -> float:
    """Each part's mean over all of its items, weighted."""
    side.model.eval()
    total: dict[str, float] = {}
    count: dict[str, int] = {}
    for step, positions in enumerate(BatchSampler([1] * len(held_out), 32, shuffle=False).epoch(0)):
        example = collator([held_out[index] for index in positions], step)
        items = count_items(collator, example)
        for name, (mean, weight) in side.parts(example).items():
            total[name] = total.get(name, 0.0) + weight * mean.item() * items[name]
            count[name] = count.get(name, 0) + items[name]
    return sum(total[name] / count[name] for name in total)
