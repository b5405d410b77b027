"""Checks that what a live model of transformers has around its layers is as in a new model of its class."""

import copy
from typing import TYPE_CHECKING

from torch import nn

from fastenc.integrations.transformers.hooks import forward_reason
from fastenc.integrations.transformers.live_encoder import POOLER
from fastenc.integrations.transformers.live_model import (
    Allowed,
    Snapshot,
    first_difference,
    new_of_same_class,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LiveHead:
    """The head of a live model: its forward, the modules outside of its encoder, and the encoder's pooler."""

    def __init__(self, model: "PreTrainedModel"):
        self.expected = new_of_same_class(model)
        self._last: tuple[Snapshot, str | None] | None = None

    def unsupported_reason(self, model: "PreTrainedModel") -> str | None:
        """Why the head may compute something else than its class in transformers, or None."""
        return forward_reason(model) or self._difference(model)

    def _difference(self, model: "PreTrainedModel") -> str | None:
        if getattr(model.config, "vocab_size", None) != self.expected.config.vocab_size:
            # The model's resize_token_embeddings gives the head a new decoder and changes the configuration.
            self.expected, self._last = new_of_same_class(model), None
        last = self._last
        if last is not None and last[0].is_current():
            return last[1]
        # The rest of the encoder is compared by its LiveEncoder.
        encoder, pooler = model.base_model, _pooler(model)
        inside = set(encoder.modules()) - {encoder, *pooler.modules()}
        snapshot = Snapshot([module for module in model.modules() if module not in inside])
        called = Allowed(called=frozenset({model.base_model_prefix}))
        reason = first_difference(model, self.expected, called)
        reason = reason or first_difference(pooler, _pooler(self.expected), Allowed(), POOLER)
        self._last = snapshot, reason
        return reason

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_last": None}

    def __deepcopy__(self, memo: dict) -> "LiveHead":
        return copy.copy(self)  # __getstate__ leaves out the modules that were compared


def _pooler(model: "PreTrainedModel") -> nn.Module:
    """The encoder's pooler, or an empty module in its place."""
    pooler = getattr(model.base_model, POOLER, None)
    return nn.Identity() if pooler is None else pooler
