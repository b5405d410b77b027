"""Pretrains a small BERT on docstrings."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastenc.objectives import token_ids
from fastenc.train import NewModel, ObjectiveOptions, PretrainConfig, objective_trainer
from fastenc.train.log import read_log

STEPS = 520
NEW = NewModel(vocab_size=2000, layers=2, hidden=128, dropout=0.0)
OBJECTIVE = ObjectiveOptions("mlm", block_size=64)


def run(texts: list[str], folder: Path) -> dict:
    """Train a tokenizer and then a masked LM. One text in twenty is held out.

    Returns: lines of the log; metrics on held-out texts before and after training; :func:`frequency_loss`; folder of
        the model.
    """
    held_out, training = texts[::20], [t for index, t in enumerate(texts) if index % 20]
    tokenizer = NEW.make_tokenizer(training)
    model = NEW.make(OBJECTIVE, tokenizer)
    config = PretrainConfig(
        str(folder),
        max_steps=STEPS,
        batch_size=32,
        learning_rate=3e-3,
        eval_every=max(1, STEPS // 4),
        warmup=0.1,
    )
    trainer = objective_trainer(OBJECTIVE, model, training, config, dev=held_out)
    assert trainer.evaluate is not None
    before = trainer.evaluate(trainer.model)
    after = trainer.train()
    frequencies = frequency_loss(trainer.examples, OBJECTIVE.pack(held_out, tokenizer))
    return {
        "log": read_log(folder / "log.jsonl"),
        "before": before,
        "after": after,
        "frequencies": frequencies,
        "folder": folder,
    }


def frequency_loss(training: Sequence[Any], held_out: Sequence[Any]) -> float:
    """Mean loss (nats) on held-out tokens of a model that predicts each token by its frequency in the training set.

        -1/n sum_i log((count(token_i) + 1) / (number of tokens + number of different tokens))

    A masked LM learns the frequencies first. A lower loss shows that it has learnt more than them.
    """
    counts = Counter(token for example in training for token in token_ids(example))
    tokens = [token for example in held_out for token in token_ids(example)]
    total = sum(counts.values()) + len(counts)
    return -sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens)
