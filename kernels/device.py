"""The size of persistent grids."""

from functools import cache

import torch


@cache
def persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Number of programs of a persistent grid; 4 under Triton's interpreter, whose tensors lie on the CPU."""
    if device.type != "cuda":
        return 4
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
