"""Modes of torch that tests on a GPU run under."""

from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """Inside, torch raises where the host would wait for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic():
    """Inside, gradients repeat bit for bit, and what torch cannot repeat raises."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
