"""The state of an encoder's adaptations (:mod:`fastenc.adapt`), as one object that the encoder holds."""

from typing import Any, cast

from torch import Tensor, nn

from fastenc.nn.adaptation import used_name

# LoRA target outside the layers → path of the module in an encoder.
ENCODER_PARTS = {
    "word": "embeddings.word",
    "token_type": "embeddings.token_type",
    "pooler": "pooler",
}


class AdaptationState(nn.Module):
    """The adaptations of one encoder. Modules that they add to a layer are stored in the layer.

    Attributes:
        descriptions: name → the adaptation's description.
        current: name of the adaptation in use, or None.
        first_position: position of every sequence's first token; a prefix takes the positions before it.
        prompts: name → vectors (length, hidden_size) that are prepended to every sequence.
        parts: name → LoRA's additions to modules outside the layers, by the names of :data:`ENCODER_PARTS`.
        tasks: names of the adaptations that the checkpoint has for its tasks.
        heads: name → values of the head's parameters for this adaptation; None: for the model without adaptation.
        of_encoder_decoder: whether the encoder is part of an encoder-decoder, which keeps no adaptations.
        unmerged_weights: (weight, copy of its values before an adaptation was merged into it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: dict[str, Any] = {}
        self.current: str | None = None
        self.first_position = 0
        self.prompts = nn.ParameterDict()
        self.parts = nn.ModuleDict()
        self.tasks: tuple[str, ...] = ()
        self.heads: dict[str | None, dict[str, Tensor]] = {}
        self.of_encoder_decoder = False
        self.unmerged_weights: list[tuple[Tensor, Tensor]] = []

    def parts_in_use(self) -> dict[str, nn.Module]:
        """Module outside the layers → the LoRA addition of the adaptation that this call uses."""
        name = used_name(None if self.unmerged_weights else self.current)
        if name is None or name not in self.parts:
            return {}
        return dict(cast(nn.ModuleDict, self.parts[name]).items())

    def prompt(self) -> Tensor | None:
        """(length, hidden_size), the prompt of the adaptation in use."""
        if self.current is None or self.current not in self.prompts:
            return None
        return self.prompts[self.current]

    def in_use(self) -> Any:
        """The description of the adaptation in use, or None."""
        return None if self.current is None else self.descriptions[self.current]
