"""The namespace torch.ops.fastenc: schemas here, C++ implementations in the compiled library.

The schemas are defined in Python so that an installation without a compiled extension has them too.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from fastenc._base import debug
from fastenc.ops import compiled

library = torch.library.Library("fastenc", "DEF")
triton_kernels: dict[str, Callable] = {}

_C = compiled.load()  # it registers the C++ implementations

HAS_CPP = _C is not None
HAS_CUDA = _C is not None and _C.build_info()["cuda"] is not None
HAS_TRITON = importlib.util.find_spec("triton") is not None


CPP_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def define(schema: str, fake, triton: str | None = None) -> None:
    """Declare an op.

    Args:
        fake: computes shapes and dtypes of the outputs for torch.compile.
        triton: "module.function" of fastenc.kernels that runs the op on CUDA tensors. It is imported at the first call,
            because triton is slow to import and not always installed.
    """
    library.define(schema)
    name = schema.split("(", 1)[0]
    torch.library.register_fake(f"fastenc::{name}")(fake)
    if triton is not None:
        triton_kernels[name] = when_called(*triton.split("."))
        library.impl(name, triton_kernels[name], "CUDA")


def when_called(module: str, function: str):
    """A function of fastenc.kernels, imported at its first call, on the device of its first tensor."""

    @cache
    def imported() -> Callable:
        return getattr(importlib.import_module(f"fastenc.kernels.{module}"), function)

    def run(*arguments):
        tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
        # A training step has a hundred of these calls, in which the host's time counts.
        index = tensor.get_device()
        if not debug.ENABLED and (index < 0 or index == torch.cuda.current_device()):
            return imported()(*arguments)
        with torch.cuda.device_of(tensor), debug.triton_op():
            return imported()(*arguments)

    return run
