"""Copies of parameters in autocast's dtype, which an optimiser keeps current.

:func:`fastenc.nn.cast_weights.cast_weights` makes the copies. :class:`fastenc.nn.adamw.AdamW` watches its parameters.
It writes the copies with them, and the next forward takes the copies instead of casting again. A copy is current while
nothing else has changed the parameter: torch counts changes in place, and another tensor has another address. Torch
does not count changes through ``parameter.data``: code that makes such a change calls :func:`forget`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class _Copy(NamedTuple):
    """A copy, and the parameter's address and count of changes when it was written."""

    tensor: Tensor
    address: int
    version: int


# Watched parameter → its copy, or None before there is one.
_copies = WeakTensorKeyDictionary()


def watch(parameters: Iterable[Tensor]) -> None:
    """From now on keep the copies that are made of these parameters."""
    for parameter in parameters:
        _copies.setdefault(parameter, None)


def unwatch(parameters: Iterable[Tensor]) -> None:
    """Drop the copies of these parameters, and keep no more."""
    for parameter in parameters:
        _copies.pop(parameter, None)


def keep(parameter: Tensor, copy: Tensor) -> None:
    """Keep a copy that has just been made, if the parameter is watched."""
    if parameter in _copies:
        _copies[parameter] = _Copy(copy, parameter.data_ptr(), parameter._version)


def current(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The parameter's copy in this dtype, if the parameter has not changed since the copy was written."""
    copy = _copies.get(parameter)
    if copy is None or copy.tensor.dtype != dtype:
        return None
    unchanged = copy.address == parameter.data_ptr() and copy.version == parameter._version
    return copy.tensor if unchanged else None


def written(parameters: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
    """Say that a kernel has changed these parameters, and with each the copy beside it."""
    # A backward that still needs the old values raises, as after any change in place.
    changed = [*parameters, *(copy for copy in copies if copy is not None)]
    torch.autograd.graph.increment_version(changed)
    for parameter, copy in zip(parameters, copies, strict=True):
        if copy is not None:
            keep(parameter, copy)


def forget(parameters: Iterable[Tensor]) -> None:
    """Drop the copies of these parameters; the next forward makes new ones."""
    for parameter in parameters:
        if parameter in _copies:
            _copies[parameter] = None
