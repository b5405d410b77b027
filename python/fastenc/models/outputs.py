"""The result of a model's forward."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LossTerm(NamedTuple):
    """One term of a loss: the mean over the term's items (a float32 scalar), and its weight."""

    mean: Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class ModelOutput:
    """The result of a model with a head.

    Fields:
        loss: float32 scalar; None without labels.
        logits: None if the loss was computed without all of them.
        terms: name → term, if the loss is a weighted sum of several terms.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    terms: dict[str, LossTerm] | None = None
