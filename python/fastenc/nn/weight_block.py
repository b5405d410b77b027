"""Frozen weights in one block of memory, which Linux maps in huge pages.

One short text reads each weight once. In pages of 4 KB the processor then looks up thousands of addresses.
"""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.nn.layer_call import Prepared
from fastenc.nn.layer_weights import LayerWeights

LINE = 64  # bytes of a line of the cache


class _Place(NamedTuple):
    """Where a packed weight lies in the block."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, block: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return block[self.start : self.start + size].view(self.dtype).view(self.shape)


class ByteCounter:
    """Counts the bytes that packed weights take in a block."""

    def __init__(self) -> None:
        self.size = 0

    def count(self, packed: Tensor) -> Tensor:
        """Count a weight, which may be on the meta device, and return it."""
        self.size += -(-packed.nbytes // LINE) * LINE
        return packed


class WeightBlock:
    """A block of ``size`` bytes. Each weight is copied into it before the next is packed.

    All packed weights beside the block would be twice the memory, and malloc may keep the half that is freed.
    """

    def __init__(self, size: int) -> None:
        self._memory, self._used = _new_block(size), ByteCounter()

    def store(self, packed: Tensor) -> Tensor:
        """The weight's copy in the block."""
        place = _Place(self._used.size, packed.dtype, packed.shape)
        self._used.count(packed)
        return place.of(self._memory).copy_(packed)


def without_values(weights: LayerWeights) -> LayerWeights:
    """The weights on the meta device."""
    return _replaced(weights, {id(tensor): tensor.to("meta") for tensor in weights.tensors()})


def split(layers: list[Prepared]) -> tuple[Tensor, list[Prepared]]:
    """The block of a model's layers, and the layers with places in it: each view that is pickled would bring the whole
    block."""
    tensors = [tensor for layer in layers for tensor in _packed(layer)]
    block = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    begin = block.data_ptr()
    places = {id(t): _Place(t.data_ptr() - begin, t.dtype, t.shape) for t in tensors}
    return block, [_replaced(layer, places) for layer in layers]


def join(block: Tensor, layers: list[Prepared]) -> list[Prepared]:
    """The inverse of :func:`split`."""
    return [_joined(layer, block) for layer in layers]


def _new_block(size: int) -> Tensor:
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _packed(layer: Prepared) -> list[Tensor]:
    """The packed weights, of which there are one or more for each product."""
    values = [*(layer.packed or ()), *(layer.int8 or ())]
    values += [each for value in values if isinstance(value, tuple) for each in value]
    return [value for value in values if isinstance(value, Tensor)]


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """``value`` with other values for its tensors, by their ids, at any depth of its tuples and lists."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    return _rebuilt(value, lambda each: _replaced(each, others))


def _joined(value: Any, block: Tensor) -> Any:
    if isinstance(value, _Place):
        return value.of(block)
    return _rebuilt(value, lambda each: _joined(each, block))


def _rebuilt(value: Any, change: Any) -> Any:
    """A list, tuple or named tuple of changed values; any other value as it is."""
    if isinstance(value, list):
        return [change(each) for each in value]
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return value
    values = [change(each) for each in value]
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
