"""Losses with several terms: the mean of each term, its weight, and the number of items that are averaged."""

from typing import Any

import torch
from torch import Tensor

from fastenc.models import LossTerm, ModelOutput
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments


def loss_terms(output: ModelOutput) -> dict[str, LossTerm]:
    """The terms of a model's loss by name; {"loss": ...} for a loss with a single term.

    Raises: ValueError if the output has no loss.
    """
    if output.terms is not None:
        return output.terms
    if output.loss is None:
        raise ValueError("the model must return a loss, got none: give it labels")
    return {"loss": LossTerm(output.loss)}


def weighted_sum(terms: dict[str, LossTerm]) -> Tensor:
    """The loss: sum of weight × mean over the terms."""
    return torch.stack([term.weight * term.mean for term in terms.values()]).sum()


def count_items(collate: Any, arguments: ModelArguments) -> dict[str, int]:
    """The number of items that each term is a mean over, counted on the host.

    Args:
        collate: for a loss with several terms, it needs a method ``items(arguments)`` that returns {term: number}.
        arguments: the model's arguments, as ``collate`` made them.
    Returns: {term: number}.
    """
    if hasattr(collate, "items"):
        return collate.items(arguments)
    return {"loss": labelled_items(arguments["labels"])}


def labelled_items(labels: Tensor) -> int:
    """The number of items that a loss is a mean over: labels other than -100, or all labels of a regression."""
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())
