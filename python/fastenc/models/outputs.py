"""What a model's forward returns."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class LossPart(NamedTuple):
    """One term of a combined loss: a float32 scalar, the mean over the term's own items, and its weight."""

    mean: Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class ModelOutput:
    """loss: float32 scalar or None; logits or None; parts: the terms whose weighted sum is the loss, by name."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    parts: dict[str, LossPart] | None = None
