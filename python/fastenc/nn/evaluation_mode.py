"""Evaluation for the length of a block: of a model, or of this thread's calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

_no_dropout: ContextVar[bool] = ContextVar(
    "encoders of this thread's calls have no dropout", default=False
)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Call ``model.eval()``; afterwards, and after an error too, ``model.train`` with the mode from before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Encoders that are called inside, by this thread, have no dropout; their mode, which other threads see, stays."""
    token = _no_dropout.set(True)
    try:
        yield
    finally:
        _no_dropout.reset(token)


def trains(module: nn.Module) -> bool:
    """Whether a call of the module has dropout."""
    return module.training and (torch.compiler.is_compiling() or not _no_dropout.get())
