"""Losses of several parts: how many items each is a mean over."""

from typing import Any

import torch
from torch import Tensor

from fastenc.models import LossPart, ModelOutput


def loss_parts(output: ModelOutput) -> dict[str, LossPart]:
    """The terms of a model's loss; {"loss": ...} where it has one only."""
    if output.parts is not None:
        return output.parts
    if output.loss is None:
        raise ValueError("the model gave no loss: its arguments must hold labels")
    return {"loss": LossPart(output.loss)}


def weighted_sum(parts: dict[str, LossPart]) -> Tensor:
    """The loss that the parts make."""
    return torch.stack([part.weight * part.mean for part in parts.values()]).sum()


def count_items(collate: Any, arguments: dict[str, Any]) -> dict[str, int]:
    """Items that each part of the loss is a mean over, on the host.

    Args:
        collate: its method ``items(arguments)`` gives them for a loss of several parts.
        arguments: of the model.
    """
    if hasattr(collate, "items"):
        return collate.items(arguments)
    return {"loss": labelled_items(arguments["labels"])}


def labelled_items(labels: Tensor) -> int:
    """Items that a loss is a mean over: all targets of a regression, classes other than -100."""
    return labels.numel() if labels.is_floating_point() else int((labels != -100).sum())
