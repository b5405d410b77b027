"""Modes of torch for tests on a GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """A context in which torch raises if the host would wait for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic():
    """A context in which gradients repeat bit for bit, and torch raises for ops that cannot."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
