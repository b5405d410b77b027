"""Float32 matrix products on a CPU, by our own kernel where MKL would leave half of the processor unused.

PyTorch hands them to MKL, which has no AVX-512 code for other makers' processors than Intel's. There the kernel is
about twice as fast; elsewhere, and for every other dtype and device, a product is torch's own.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import _dispatch, _library
from fastenc.ops._column_sum import column_sum


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


PANEL_COLUMNS = 64


def pack_panels(weight: Tensor) -> Tensor:
    """A layer's weight (out_features, in_features) in the order in which our kernel reads it.

    Returns: (groups of 64 outputs, in_features, 64), the last group filled up with 0.
    """
    columns, depth = weight.shape
    filled = F.pad(weight, (0, 0, 0, -columns % PANEL_COLUMNS))
    return filled.view(-1, PANEL_COLUMNS, depth).transpose(1, 2).contiguous()


def multiply_packed(a: Tensor, panels: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """:func:`multiply` by a weight that :func:`pack_panels` has packed, transposed, of so many columns."""
    return torch.ops.fastenc.matmul_packed(a, panels, bias, columns)


def fastest_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """A call of the fastest product a b known here, for a device's ceiling."""
    if _by_ours(a, b):
        panels = pack_panels(b.t())
        return lambda: multiply_packed(a, panels, None, b.shape[1])
    # Into the same result each time: on a CPU new pages would cost more than a small product.
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return lambda: out.addmm_(a, b)


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
            column_sum(dy) if needs_bias else None,
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
_library.define(
    "matmul_packed(Tensor a, Tensor panels, Tensor? bias, int columns) -> Tensor",
    lambda a, panels, bias, columns: a.new_empty((a.shape[0], columns)),
)
