"""Which operators of the library a piece of code calls, and the Triton kernels behind them without a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fastenc.ops import dispatch, library


class OperatorCalls(TorchDispatchMode):
    """Keeps the arguments of the first call of each operator of the library inside: {operator: (args, kwargs)}."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "fastenc" and function not in self.arguments:
            given = arguments, options or {}
            self.arguments[function] = tree_map_only(Tensor, Tensor.detach, given)
        return function(*arguments, **(options or {}))


@contextmanager
def triton_kernels_on_cpu() -> Iterator[None]:
    """Inside, ``impl="cpp"`` and "auto" start Triton's kernels on CPU tensors.

    Triton's interpreter has to run them, or a driver that takes such tensors.
    """
    limit = lambda op, impl, x, cpp_limit, triton_limit: triton_limit
    overrides = torch.library.Library("fastenc", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the kernel is overridden
        for name, kernel in library.triton_kernels.items():
            overrides.impl(name, kernel, "CPU", allow_override=True)
    try:
        with mock.patch.object(dispatch, "unsupported_reason", limit):
            yield
    finally:
        overrides._destroy()
