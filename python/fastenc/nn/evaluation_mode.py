"""Context managers that switch a model to evaluation mode, or dropout off for the calls of one thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import nn

_no_dropout: ContextVar[bool] = ContextVar(
    "encoders of this thread's calls have no dropout", default=False
)


class HasMode(Protocol):
    """A module's mode: training or evaluation."""

    training: bool

    def modules(self) -> Iterator[nn.Module]: ...

    def eval(self) -> object: ...

    def train(self, mode: bool = True) -> object: ...


@contextmanager
def evaluation_mode(model: HasMode) -> Iterator[None]:
    """Put the model in evaluation mode inside the block, and back in its previous mode afterwards, also on an error.

    Modules of a model may have different modes, such as a frozen encoder in evaluation mode under a head in training.
    """
    was_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module, mode in modes:
            module.training = mode


@contextmanager
def without_dropout() -> Iterator[None]:
    """Inside the block, encoders that this thread calls have no dropout.

    Their training mode is not changed, because other threads would see that.
    """
    token = _no_dropout.set(True)
    try:
        yield
    finally:
        _no_dropout.reset(token)


def trains(module: nn.Module) -> bool:
    """Whether a call of the module by this thread applies dropout."""
    return module.training and (torch.compiler.is_compiling() or not _no_dropout.get())
