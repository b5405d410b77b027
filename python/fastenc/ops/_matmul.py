"""Float32 matrix products on a CPU, by our own kernel where MKL would leave half of the processor unused.

PyTorch hands them to MKL, which has no AVX-512 code for other makers' processors than Intel's. There the kernel is
about twice as fast; elsewhere, and for every other dtype and device, a product is torch's own.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import _dispatch, _library


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear`, differentiable like it."""
    if _dispatch.autocast_dtype(x.device.type) or not _by_ours(x, weight):
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return _Linear.apply(x, weight, bias)
    return multiply(x, weight.t(), bias)


def multiply(
    a: Tensor, b: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """a b + bias, or a b + added, without a gradient.

    Args:
        a: (rows, inner); b: (inner, columns), of a's dtype; either may be transposed.
        bias: (columns,); added: contiguous (rows, columns), which is overwritten with the result.
    Numerics: sums of 128 terms, added up in their order: an element does not depend on rows beside it or on threads.
    """
    if _by_ours(a, b):
        if added is None:
            return torch.ops.fastenc.matmul(a, b, bias)
        torch.ops.fastenc.matmul_add_(added, a, b)
        return added
    return F.linear(a, b.t(), bias) if added is None else added.addmm_(a, b)


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
        return (
            multiply(dy, weight) if needs_x else None,
            multiply(dy.t(), x) if needs_weight else None,
            dy.sum(0) if needs_bias else None,
        )


def _by_ours(a: Tensor, b: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and a.dim() == 2
        and a.shape[1] > 0
        and ours_is_faster()
    )


@cache
def ours_is_faster() -> bool:
    """On a processor with AVX-512 that MKL does not use it on; MKL's AVX2 code is as fast as AVX2 can be."""
    return (
        _library.HAS_CPP
        and torch.backends.mkl.is_available()
        and not (built := _library._C.build_info())["intel_processor"]
        and built["instruction_set"] == "avx512"
    )


_library.define(
    "matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    lambda a, b, bias: a.new_empty((a.shape[0], b.shape[1])),
)
_library.define("matmul_add_(Tensor(a!) c, Tensor a, Tensor b) -> ()", lambda c, a, b: None)
