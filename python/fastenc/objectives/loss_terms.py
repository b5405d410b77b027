"""Losses of several terms: the mean of each term, its weight, and how many items the mean is over."""

from typing import Any

import torch
from torch import Tensor

from fastenc.models import LossTerm, ModelOutput


def loss_terms(output: ModelOutput) -> dict[str, LossTerm]:
    """The terms of a model's loss by name; {"loss": ...} if it has a single term."""
    if output.terms is not None:
        return output.terms
    if output.loss is None:
        raise ValueError("the model returned no loss: its arguments must hold labels")
    return {"loss": LossTerm(output.loss)}


def weighted_sum(terms: dict[str, LossTerm]) -> Tensor:
    """The loss: sum of weight × mean over the terms."""
    return torch.stack([term.weight * term.mean for term in terms.values()]).sum()


def count_items(collate: Any, arguments: dict[str, Any]) -> dict[str, int]:
    """The number of items that each term is a mean over, counted on the host.

    Args:
        collate: a loss of several terms needs its method ``items(arguments)``, which returns these numbers.
        arguments: the model's arguments, as ``collate`` made them.
    """
    if hasattr(collate, "items"):
        return collate.items(arguments)
    return {"loss": labelled_items(arguments["labels"])}


def labelled_items(labels: Tensor) -> int:
    """The number of items that a loss is a mean over: all targets of a regression, classes other than -100."""
    return labels.numel() if labels.is_floating_point() else int((labels != -100).sum())
