"""What a model's forward returns."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LossTerm(NamedTuple):
    """One term of a loss: the mean over the term's items (a float32 scalar), and its weight."""

    mean: Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class ModelOutput:
    """The fields that every model returns.

    Fields:
        loss: float32 scalar; None without labels.
        logits: None where the loss does not need them all.
        terms: the loss's terms by name, if it has several; the loss is their weighted sum.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    terms: dict[str, LossTerm] | None = None
