"""What launches ask about the device."""

import torch


def persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs of a persistent grid; a small fixed number where the interpreter stands in for the device."""
    if device.type != "cuda":
        return 4
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
