"""Frozen weights in one block of memory, which Linux maps in huge pages.

One short text reads each weight once. In pages of 4 KB the processor then looks up thousands of addresses.
"""

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fastenc.nn.layer_call import Prepared

LINE = 64  # bytes of a line of the cache


def in_one_block(layers: list[Prepared]) -> list[Prepared]:
    """The same copies, with their packed weights in one block; elsewhere than on Linux as they are.

    ``layers`` becomes empty, because a layer's own tensors are freed before those of the next are copied.
    """
    size = sum(_room(tensor) for layer in layers for tensor in _packed(layer))
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return layers
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    block, start, moved = torch.frombuffer(memory, dtype=torch.uint8), 0, list[Prepared]()
    layers.reverse()
    while layers:
        layer, views = layers.pop(), {}
        for tensor in _packed(layer):
            view = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            views[id(tensor)] = view.copy_(tensor)
            start += _room(tensor)
        moved.append(_replaced(layer, views))
    return moved


def apart(layers: Sequence[Prepared]) -> list[Prepared]:
    """The same copies, each in its own memory: a pickled view would bring the whole block."""
    return [
        _replaced(layer, {id(tensor): tensor.clone() for tensor in _packed(layer)})
        for layer in layers
    ]


def _packed(layer: Prepared) -> list[Tensor]:
    """The packed weights, of which there are one or more for each product."""
    values = [*(layer.packed or ()), *(layer.int8 or ())]
    values += [each for value in values if isinstance(value, tuple) for each in value]
    return [value for value in values if isinstance(value, Tensor)]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // LINE) * LINE


def _replaced(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """``value`` with other tensors, by their ids, at any depth of its tuples and lists."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, list):
        return [_replaced(each, tensors) for each in value]
    if isinstance(value, tuple):
        values = [_replaced(each, tensors) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return value
