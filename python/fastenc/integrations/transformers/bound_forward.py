"""The forward that a patched module has as an attribute: a function of ours, bound to the module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class BoundForward(functools.partial[Any]):
    """A function bound to a module. In a copied or unpickled model it is bound to the copy.

    A bound method would not do: pickle looks its function up in the module's class. But libraries that wrap a method
    (accelerate, in mixed precision) take its function, wrap that and bind it to the module, and later to each copy of
    the module. They find the two here.
    """

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Callable[..., Any]:
        return _unbound(self.func, self.args[0].__class__)


@functools.cache
def _unbound(function: Callable[..., Any], module_class: type) -> Callable[..., Any]:
    """``function`` with the signature of a class's forward, which the Trainer reads after a library has bound it."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    forward.__signature__ = inspect.signature(module_class.forward)  # type: ignore[attr-defined]
    return forward


def calls(forward: Any, function: Callable[..., Any]) -> bool:
    """Whether a forward is ``function`` bound to a module, by us or by a library that has unwrapped the module."""
    bound, module = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    return module is not None and bound is _unbound(function, module.__class__)
