"""Functions that torch.compile calls while it traces."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_trace(function: F) -> F:
    """Mark a function whose result is a constant of the compiled graph.

    ``torch.compiler.assume_constant_result`` does the same, but it also imports the compiler. That takes as long as
    importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
