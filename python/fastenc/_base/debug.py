"""FASTENC_DEBUG=1: checks that are too expensive for every call.

- Values of inputs (ids, labels, offsets) are checked on every device, and at every call. Without the switch they are
  checked in the host's memory alone, because on a GPU the check waits for the device. torch.compile and the capture of
  a CUDA graph skip them in either case.
- The floating-point memory that a Triton op allocates is filled with NaN before its kernels start. A row that no
  kernel writes, such as one behind the last offset, is NaN where it is read.
- Triton kernels are compiled with their assertions. One that fails on a GPU ends the process's CUDA context.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ENABLED = os.environ.get("FASTENC_DEBUG", "0") != "0"
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


def may_read(values: Tensor) -> bool:
    """Whether a check may read a tensor's values."""
    if torch.compiler.is_compiling() or values.is_meta:
        return False
    if values.device.type == "cpu":
        return True
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return ENABLED and not captured


class _FilledWithNaN(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _ALLOCATIONS and result.is_floating_point():
            result.fill_(torch.nan)
        return result


def triton_op() -> AbstractContextManager:
    """A context for the host function of a Triton op."""
    if not ENABLED:
        return nullcontext()
    from triton import knobs

    knobs.runtime.debug = True
    return _FilledWithNaN()
