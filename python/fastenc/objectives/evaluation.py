"""The loss of a pretraining objective, and of each of its terms, on held-out examples."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastenc._base.transfer import send_arguments
from fastenc.data import BatchSampler
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.base import Collator
from fastenc.objectives.loss_terms import count_items, loss_terms
from fastenc.packing import ModelArguments


@torch.inference_mode()
def evaluate_objective(
    model: PretrainedModel, examples: Sequence[Any], collate: Collator, batch_size: int = 32
) -> dict[str, float]:
    """The mean loss of a model over held-out examples.

    Batch i gets the corruption of step i. So every evaluation with the same collator corrupts the same tokens, and
    losses of several evaluations can be compared.

    Args:
        collate: a collator with another seed than in training.
    Returns: {name of each term: its mean, "loss": weighted sum of the means, "perplexity": exp(masked-LM loss)}.
    """
    device = next(model.parameters()).device
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    weights: dict[str, float] = {}
    with evaluation_mode(model):
        for arguments in _batches(examples, collate, batch_size):
            items = count_items(collate, arguments)
            terms = loss_terms(model(**send_arguments(arguments, device)))
            for name, (mean, weight) in terms.items():
                zero = torch.zeros((), dtype=torch.float64, device=device)
                totals[name] = totals.get(name, zero) + mean * items[name]  # read at the end
                counts[name] = counts.get(name, 0) + items[name]
                weights[name] = weight
    means = {name: total.item() / max(counts[name], 1) for name, total in totals.items()}
    loss = sum(weights[name] * mean for name, mean in means.items())
    perplexity = math.exp(min(means.get("mlm", loss), 700.0))
    return {**means, "loss": loss, "perplexity": perplexity}


def check_held_out(examples: Sequence[Any], collate: Collator, batch_size: int = 32) -> None:
    """Raises: ValueError if the examples have nothing to predict for a term of the loss, which would then be 0.

    Args: as :func:`evaluate_objective`.
    """
    counts: dict[str, int] = {}
    for arguments in _batches(examples, collate, batch_size):
        for name, number in count_items(collate, arguments).items():
            counts[name] = counts.get(name, 0) + number
        if all(counts.values()):
            return
    without = ", ".join(name for name, number in counts.items() if not number)
    raise ValueError(
        f"held-out texts must have tokens to predict, got none for {without} in {len(examples):,} sequences: hold out "
        "more or longer texts"
    )


def _batches(
    examples: Sequence[Any], collate: Collator, batch_size: int
) -> Iterator[ModelArguments]:
    batches = BatchSampler([1] * len(examples), batch_size, shuffle=False).epoch(0)
    for step, indices in enumerate(batches):
        yield collate([examples[index] for index in indices], step)
