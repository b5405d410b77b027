"""The dropout of a layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.ops import checks


class LayerDropout(NamedTuple):
    """Dropout probabilities of one layer, 0 in evaluation.

    Fields:
        attention: of the softmax weights; attention_out: of the attention sublayer's output.
        inner: of the feed-forward layer's activations; down: of the feed-forward sublayer's output.
        positions: of the embeddings of relative positions, before they are projected.
        cross, cross_out: as attention and attention_out, of the sublayer that attends to a source.
        rng_states: int64 (2,) for each of attention, attention_out, down, cross and cross_out, seed and offset of the
            mask, as :func:`with_rng_states` makes them for all layers. None: the op takes a random state.
    """

    attention: float = 0.0
    attention_out: float = 0.0
    inner: float = 0.0
    down: float = 0.0
    positions: float = 0.0
    cross: float = 0.0
    cross_out: float = 0.0
    rng_states: tuple[Tensor | None, ...] = (None,) * 5

    def probabilities(self) -> dict[str, float]:
        """Name → probability of each dropout that is on."""
        names = (name for name in self._fields if name != "rng_states")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def after_self_attention(self) -> "LayerDropout":
        """As :meth:`LayerWeights.after_self_attention`."""
        _, _, down, *of_cross = self.rng_states
        return self._replace(
            attention=self.cross, attention_out=self.cross_out, rng_states=(*of_cross, down)
        )


NO_DROPOUT = LayerDropout()


def with_rng_states(dropouts: Sequence[LayerDropout], device: torch.device) -> list[LayerDropout]:
    """The layers' dropout with random states, which one call of the generator (one launch on a GPU) makes for all."""
    if all(dropout is NO_DROPOUT or not dropout.probabilities() for dropout in dropouts):
        return list(dropouts)
    # Encoders draw no states for sublayers that they lack, so a seed gives them the masks that it always gave.
    crosses = any(dropout.cross or dropout.cross_out for dropout in dropouts)
    masks = len(NO_DROPOUT.rng_states) if crosses else 3
    states = checks.draw_rng_states(device, masks * len(dropouts))
    missing = NO_DROPOUT.rng_states[masks:]
    return [
        dropout._replace(rng_states=(*states[masks * i : masks * (i + 1)], *missing))
        for i, dropout in enumerate(dropouts)
    ]
