"""Functions that torch.compile calls while it traces."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_trace(function: F) -> F:
    """The function; a compiled graph has its result as a constant.

    It does all that ``torch.compiler.assume_constant_result`` does, but for importing the compiler, which takes as long
    as importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
