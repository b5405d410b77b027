"""A way of running a layer."""

from collections.abc import Callable
from dataclasses import dataclass

from fastenc.nn.features import unknown_features
from fastenc.nn.layer_call import LayerCall
from fastenc.nn.layer_inputs import LayerState


@dataclass(frozen=True)
class Way:
    """A way of running a layer, closed by default: it refuses every feature of a call that it does not name.

    Fields:
        takes: the features (:meth:`fastenc.nn.layer_call.LayerCall.features`) that ``run`` computes.
        reason: why ``run`` cannot take a call of these features, or None.
    """

    name: str
    takes: frozenset[str]
    reason: Callable[[LayerCall], str | None]
    run: Callable[[LayerCall], LayerState]

    def unsupported_reason(self, layer_call: LayerCall) -> str | None:
        """Why this way cannot take the call, or None."""
        reason = self.reason(layer_call)
        if reason is not None:
            return reason
        return unknown_features(layer_call.features(), self.takes)
