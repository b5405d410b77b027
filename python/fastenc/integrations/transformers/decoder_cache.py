"""transformers' cache of a decoder whose keys and values fastenc holds, in the memory that its kernels read."""

from abc import abstractmethod
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from fastenc.integrations.transformers.live_encoder import FrozenOwner, LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.frozen_weights import frozen_layers
from fastenc.nn.layer_cache import LayerCache
from fastenc.ops import pack as pack_rows
from fastenc.ops import unpack
from fastenc.packing import pack


class HeldCache:
    """What fastenc holds of a search: the keys and values of each layer, and what all its calls attend to.

    Args:
        states, mask: the encoder's padded states and their mask, as each call gives them.
        reading: the decoder.
    Attributes:
        layers: the keys and values of each layer, none at first.
        copies: how many rows have equal sources, as those of the beams of a search. They follow each other.
        source: the packed tokens of the sources, one sequence for ``copies`` rows.
        packed_states: (source tokens, hidden_size), their states.
        complete: False as soon as transformers has taken a layer's keys and values.
    """

    def __init__(self, states: Tensor, mask: Tensor | None, reading: Reading, num_layers: int):
        self.states, self.mask, self.reading = states, mask, reading
        self.copies = _copies(states, mask)
        self._source_of_row = torch.arange(len(states), device=states.device) // self.copies
        rows = states[:: self.copies]
        ids = rows.new_zeros(rows.shape[:2], dtype=torch.long)
        self.source = pack(ids, None if mask is None else mask[:: self.copies])
        self.packed_states = pack_rows(rows, self.source)
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.complete = True
        self._packed: FrozenLayers | None = None

    def packed_weights(self, decoder: Any, live: LiveEncoder) -> FrozenLayers:
        """The decoder's packed weights: those of :func:`fastenc.freeze`, or else the search's own."""
        if self._packed is None:
            owner = FrozenOwner(decoder, live)
            self._packed = live.frozen.current() or FrozenLayers(frozen_layers(owner))
        return self._packed

    def keeps_sources(self, rows: Tensor) -> bool:
        """Whether these rows have the same sources as all rows in their order."""
        return torch.equal(rows // self.copies, self._source_of_row)


def _copies(states: Tensor, mask: Tensor | None) -> int:
    """The largest n such that the rows i n, ..., i n + n - 1 are equal for every i."""
    compared = [states] if mask is None else [states, mask]
    same = torch.stack([(each[1:] == each[:-1]).flatten(1).all(1) for each in compared]).all(0)
    return gcd(len(states), *((~same).nonzero().flatten() + 1).tolist())


class HeldLayer(DynamicLayer):
    """A layer of transformers' cache, whose keys and values fastenc holds until something reads them.

    From then on they are transformers', in its layout, and so are those of the search's later tokens.
    """

    _keys: Tensor | None
    _values: Tensor | None

    def __init__(self, held: HeldCache, number: int):
        super().__init__()
        self.held, self.number = held, number
        self.device, self.is_initialized, self.is_held = held.states.device, True, True

    @property
    def cache(self) -> LayerCache:
        return self.held.layers[self.number]

    @abstractmethod
    def padded(self) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, num_heads, length, head_dim)."""

    def _hand_over(self) -> None:
        if self.is_held:
            self.is_held = self.held.complete = False
            self._keys, self._values = self.padded()

    @property
    def keys(self) -> Tensor | None:
        self._hand_over()
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._keys = keys

    @property
    def values(self) -> Tensor | None:
        self._hand_over()
        return self._values

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._values = values

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a layer of transformers."""
        return _layer_of, (self.padded() if self.is_held else (self._keys, self._values))

    def reset(self) -> None:
        self._hand_over()
        super().reset()


def _layer_of(keys: Tensor | None, values: Tensor | None) -> DynamicLayer:
    layer = DynamicLayer()
    if keys is not None:
        layer.update(keys, values)
    return layer


class TargetLayer(HeldLayer):
    """The tokens of the targets so far."""

    def padded(self) -> tuple[Tensor, Tensor]:
        memory = self.cache.with_room(0)[:, : self.cache.length]
        keys, values = memory.permute(0, 2, 3, 1, 4)
        return keys, values

    def get_seq_length(self) -> int:
        return self.cache.length if self.is_held else super().get_seq_length()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_held:
            self.cache.select(beam_idx.to(self.device))
        else:
            super().reorder_cache(beam_idx)


class SourceLayer(HeldLayer):
    """The tokens of the sources."""

    def padded(self) -> tuple[Tensor, Tensor]:
        held, both = self.held, self.cache.source
        assert both is not None  # the first call has computed them
        heads, head_dim = self.cache.with_room(0).shape[-2:]
        rows = unpack(both, held.source).unflatten(2, (2, heads, head_dim))
        keys, values = rows.repeat_interleave(held.copies, 0).permute(2, 0, 3, 1, 4)
        return keys, values

    def get_seq_length(self) -> int:
        return self.held.states.shape[1] if self.is_held else super().get_seq_length()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not (self.is_held and self.held.keeps_sources(beam_idx)):
            super().reorder_cache(beam_idx)


def new_cache(config: Any) -> EncoderDecoderCache:
    """The empty cache that a decoder of transformers makes if it is given none."""
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def held_by(cache: Any, states: Tensor, mask: Tensor | None) -> HeldCache | None:
    """What fastenc holds of a cache, or None unless it holds all of it and these are the states of the search."""
    if type(cache) is not EncoderDecoderCache:
        return None
    parts = cache.self_attention_cache, cache.cross_attention_cache
    first = [layer for each in parts for layer in each.layers[:1]]
    if [*map(type, first)] != [TargetLayer, SourceLayer]:
        return None
    held: HeldCache = first[0].held
    # A new cache may have the targets of one search and the sources of another.
    known = first[1].held is held and held.states is states and held.mask is mask
    return held if known and held.complete else None


def is_empty(cache: Any) -> bool:
    """Whether this is transformers' usual cache, and has no keys and values yet."""
    if type(cache) is not EncoderDecoderCache:
        return False
    parts = cache.self_attention_cache, cache.cross_attention_cache
    if any(type(each) is not DynamicCache or each.offloading for each in parts):
        return False
    layers = parts[0].layers + parts[1].layers
    return all(type(each) is DynamicLayer and not each.get_seq_length() for each in layers)


def hold(cache: Any, held: HeldCache) -> None:
    """Give transformers' cache layers whose keys and values fastenc holds."""
    numbers = range(len(held.layers))
    cache.self_attention_cache.layers[:] = [TargetLayer(held, number) for number in numbers]
    cache.cross_attention_cache.layers[:] = [SourceLayer(held, number) for number in numbers]
    # So that transformers' layers read the source's keys and values.
    cache.is_updated.update(dict.fromkeys(numbers, True))
