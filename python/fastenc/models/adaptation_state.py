"""What :mod:`fastenc.adapt` has added to an encoder, as one object that the encoder holds."""

from typing import Any

from torch import Tensor, nn


class AdaptationState(nn.Module):
    """The adaptations of one encoder; what they add to the layers stands in the layers.

    Attributes:
        descriptions: name → the adaptation's description.
        current: the one in use, or None.
        first_position: of every sequence; a prefix stands on those before it.
        prompts: vectors put before every sequence, by name.
        heads: the head's values for each adaptation, None for the model without one.
        unmerged_weights: the weights as they were before an adaptation was merged into them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: dict[str, Any] = {}
        self.current: str | None = None
        self.first_position = 0
        self.prompts = nn.ParameterDict()
        self.heads: dict[str | None, dict[str, Tensor]] = {}
        self.unmerged_weights: list[tuple[Tensor, Tensor]] = []

    def prompt(self) -> Tensor | None:
        """(length, hidden_size), the prompt of the adaptation in use."""
        if self.current is None or self.current not in self.prompts:
            return None
        return self.prompts[self.current]

    def in_use(self) -> Any:
        """The description of the adaptation in use, or None."""
        return None if self.current is None else self.descriptions[self.current]
