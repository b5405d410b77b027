"""The choice of an op's implementation (docs/design/0003-dispatch.md). Each op's file declares its kernels here."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.kernels.batch_invariance import batch_invariance as batch_invariance
from fastenc.kernels.batch_invariance import is_batch_invariant as is_batch_invariant
from fastenc.ops.derivatives import reference_reason
from fastenc.ops.library import CPP_DTYPES, CUDA_DTYPES, HAS_CPP, HAS_CUDA, HAS_TRITON

IMPLEMENTATIONS = ("auto", "cpp", "cuda", "triton", "reference", "cudnn")
WIDEST_HEAD = 128  # of the kernels of attentions other than the plain one


class Kernels(NamedTuple):
    """The implementations of an op beside its reference.

    Fields:
        dtypes: those they take, if not those of most kernels.
        switch: the environment variable without which "auto" takes none of them, because their gain is not measured.
    """

    implementations: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] | None = None
    switch: str | None = None


DECLARED: dict[str, Kernels] = {}


def declare(
    op: str,
    *implementations: str,
    dtypes: tuple[torch.dtype, ...] | None = None,
    switch: str | None = None,
) -> None:
    """Declare which kernels ("cpp", "triton", "cuda", "cudnn") an op has; :func:`choose` needs the declaration."""
    DECLARED[op] = Kernels(implementations, dtypes, switch)


def choose(
    op: str,
    impl: str,
    x: Tensor,
    *,
    cpp_limit: str | None = None,
    triton_limit: str | None = None,
    reference_cost: str | None = None,
) -> str:
    """Resolve ``impl`` for input ``x`` to "cpp", "cuda", "triton", "reference" or, asked for by name, "cudnn".

    Args:
        cpp_limit, triton_limit: why that kernel cannot take the arguments of this call, or None.
        reference_cost: if given, "auto" warns of it when it has to take the reference, once for each reason.
    Raises: ValueError if an implementation that was asked for by name cannot take the call.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if impl == "auto":
        on_gpu = "cuda" if "cuda" in DECLARED[op].implementations else "triton"
        impl = "cpp" if x.device.type == "cpu" else on_gpu
        reason = _switched_off(op) or unsupported_reason(op, impl, x, cpp_limit, triton_limit)
        if reason is not None and reference_cost is not None and not torch.compiler.is_compiling():
            _warn_once(
                f"{op} takes its reference, {reference_cost}: impl={impl!r} cannot take this call: {reason}"
            )
        return impl if reason is None else "reference"
    reason = unsupported_reason(op, impl, x, cpp_limit, triton_limit)
    if reason is not None:
        raise ValueError(f"{op}: impl={impl!r} cannot take this call: {reason}")
    return impl


def head_limits(head_dim: int, widest_triton: int = WIDEST_HEAD) -> dict[str, str | None]:
    """The limits that :func:`choose` takes: why the C++ kernel and the Triton kernel cannot take heads of this width,
    each None if it can."""
    cpp = triton = None
    if head_dim % 16 or not 0 < head_dim <= WIDEST_HEAD:
        cpp = f"head_dim must be a multiple of 16 up to {WIDEST_HEAD}, got {head_dim}"
    if not 0 < head_dim <= widest_triton:
        triton = f"head_dim must be at most {widest_triton}, got {head_dim}"
    return {"cpp_limit": cpp, "triton_limit": triton}


def _switched_off(op: str) -> str | None:
    """Why "auto" takes no kernel of this op on any device, or None."""
    switch = DECLARED[op].switch
    if switch is None or os.environ.get(switch, "0") != "0":
        return None
    return f"{switch}=1 would switch its kernels on"


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts the inputs of matrix products, or None outside autocast."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def no_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast: a backward that is called inside autocast computes in the forward's dtype too."""
    device = x.device.type
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def unsupported_reason(
    op: str, impl: str, x: Tensor, cpp_limit: str | None, triton_limit: str | None
) -> str | None:
    """Why an implementation cannot take a call, or None if it can."""
    if impl == "reference":
        return None
    language = {"cpp": "C++", "triton": "Triton", "cuda": "CUDA", "cudnn": "cuDNN"}[impl]
    kernels = DECLARED[op]
    if impl not in kernels.implementations:
        return f"it has no {language} kernel"
    if (reason := reference_reason()) is not None:
        return reason
    if impl == "cpp":
        if not HAS_CPP:
            return "the compiled extension is not available: see `fastenc info`"
        if x.device.type != "cpu":
            return f"it runs on CPU tensors, got one on {x.device}"
        if x.dtype not in (kernels.dtypes or CPP_DTYPES):
            return f"it takes {_names(kernels.dtypes or CPP_DTYPES)}, got {x.dtype}"
        return cpp_limit
    if impl == "triton" and not HAS_TRITON:
        return "triton is not installed"
    if impl == "cuda" and not HAS_CUDA:
        return "the extension was compiled without CUDA: see `fastenc info`"
    if x.device.type != "cuda":
        return f"it runs on CUDA tensors, got one on {x.device}"
    if x.dtype not in (kernels.dtypes or CUDA_DTYPES):
        return f"it takes {_names(kernels.dtypes or CUDA_DTYPES)}, got {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return triton_limit if impl == "triton" else None


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    """float32, float16 or bfloat16"""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last
