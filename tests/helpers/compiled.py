"""torch.compile with dynamic shapes."""

from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from torch._dynamo import config


def compiled_once(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """The function compiled as one graph, by the first call. If a later call needs another graph, it is an error."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    stances = chain(["default"], repeat("fail_on_recompile"))

    def call(*arguments: Any, **named: Any) -> Any:
        # Otherwise floats are symbols at first, and PyTorch traces all once more to make them constants.
        with config.patch(specialize_float=True), torch.compiler.set_stance(next(stances)):
            return compiled(*arguments, **named)

    return call
