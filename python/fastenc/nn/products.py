"""Float32 matrix products on a CPU, by oneDNN where MKL would leave half of the processor unused.

PyTorch hands them to MKL, which has no AVX-512 code for other makers' processors than Intel's: one thread of an AMD
EPYC 9005 reached 95 GFLOP/s in MKL and 150 to 220 in oneDNN, which comes with PyTorch as well. The op behind it is
private to torch, so where it is missing the product is torch's own.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import _dispatch, _library


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear`, differentiable like it."""
    if _dispatch.autocast_dtype(x.device.type) or not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return _Linear.apply(x, weight, bias)
    return multiply(x, weight.t(), bias)


def multiply(
    a: Tensor, b: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """a b + bias + added, without a gradient.

    Args:
        a: (rows, inner); b: (inner, columns), of a's dtype; either may be transposed.
        bias: (columns,); added: (rows, columns), which may be overwritten; not both.
    """
    if _by_onednn(a, b):
        if added is None:
            return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(a, added, b.t(), None, "add")
    if added is not None:
        return added.addmm_(a, b)
    return F.linear(a, b.t(), bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return multiply(x, weight.t(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy = dy.contiguous()
        return (
            multiply(dy, weight) if needs_x else None,
            multiply(dy.t(), x) if needs_weight else None,
            dy.sum(0) if needs_bias else None,
        )


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and a.dim() == 2
        and a.numel() > 0
        and b.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and onednn_is_faster()
    )


@cache
def onednn_is_faster() -> bool:
    """On a processor with AVX-512 that MKL does not use it on; without AVX-512 the two are equally fast."""
    return (
        _library.HAS_CPP
        and not (built := _library._C.build_info())["intel_processor"]
        and "avx512" in built["usable_instruction_sets"].split()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
