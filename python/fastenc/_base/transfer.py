"""Copies from the host to a device for which the host does not wait."""

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

# Such as fastenc.packing.ModelArguments.
Arguments = TypeVar("Arguments", bound=Mapping[str, object])


def staged(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` in memory from which it can be copied to ``device`` asynchronously: pinned memory for a GPU.

    A copy from pageable memory can make the host wait for the work queued before it (CUDA Runtime API, "API
    synchronization behavior").
    """
    needs_pinning = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
    return tensor.pin_memory() if needs_pinning else tensor


def send(tensor: Tensor, device: torch.device | str, non_blocking: bool = True) -> Tensor:
    """``tensor`` on ``device``; the host waits for the copy only if ``non_blocking`` is False."""
    source = staged(tensor, device) if non_blocking else tensor
    return source.to(device, non_blocking=non_blocking)


def send_arguments(arguments: Arguments, device: torch.device) -> Arguments:
    """A model's keyword arguments with tensors and batches on ``device``; numbers and tuples of them are kept."""
    move = lambda value: send(value, device) if isinstance(value, Tensor) else value.to(device)
    sent = {
        name: value if isinstance(value, int | float | tuple) else move(value)
        for name, value in arguments.items()
    }
    return cast(Arguments, sent)
