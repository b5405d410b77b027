"""What launches ask about the device."""

from functools import cache

import torch
from triton.runtime import driver


def persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs of a grid that stays; a fixed small number where the interpreter stands in for the device."""
    if device.type != "cuda":
        return 4
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have; an H100's where the interpreter stands in for the device."""
    if device.type != "cuda":
        return 227 * 1024
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
