"""Whether a text gets the same bits in every batch on a GPU (``Encoder.encode(batch_invariant=True)``).

Inside the context a linear layer runs in linear.py in place of cuBLAS, attention takes its kernel for any length with
one launch, and no launch is looked up by the lengths of a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_requested: ContextVar[bool] = ContextVar("results do not depend on the batch", default=False)
DEVICES = {"cuda"}  # on a CPU the kernels have one order of sums in any case


@contextmanager
def batch_invariance(requested: bool = True) -> Iterator[None]:
    """Inside the block, calls by this thread are batch-invariant if ``requested``.

    Models that torch.compile has compiled are not: torch 2.11's Dynamo cannot read a context variable.
    """
    token = _requested.set(requested)
    try:
        yield
    finally:
        _requested.reset(token)


def is_batch_invariant(device_type: str) -> bool:
    """Whether calls on such a device have to choose kernels and launches that do not depend on the batch."""
    return device_type in DEVICES and not torch.compiler.is_compiling() and _requested.get()
