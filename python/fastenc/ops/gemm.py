"""Matrix products on a CPU, by our kernels where they are faster than PyTorch's.

PyTorch computes float32 products with MKL, which uses AVX-512 on Intel's processors only; on others our kernel is about
twice as fast. Products of few rows read each weight once, without packing, in float32 or bfloat16. On a processor
without bfloat16 units our kernel computes products of bfloat16 in float32, where PyTorch emulates bfloat16. All other
products, and those on other devices, are PyTorch's.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import dispatch, library
from fastenc.ops.column_sum import column_sum
from fastenc.ops.derivatives import in_forward_mode, once_differentiable, reference_reason

# The largest number of rows for which a weight is read without packing; csrc/gemm.cpp has the same number.
FEW_ROWS = 128

dispatch.declare("batch_invariant_linear", "triton")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear` of x (..., in_features), weight (out_features, in_features) and bias.

    Under autocast the product is PyTorch's, except where PyTorch would emulate bfloat16.

    Differentiable: all three.
    """
    if not torch.compiler.is_compiling() and dispatch.is_batch_invariant(x.device.type):
        return _batch_invariant_linear(x, weight, bias)
    if (dtype := dispatch.autocast_dtype(x.device.type)) is not None:
        if x.device.type != "cpu" or dtype != torch.bfloat16 or not emulates_bfloat16():
            return F.linear(x, weight, bias)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not _is_ours(x, weight.t()):
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return _Linear.apply(x, weight, bias)
    return torch.ops.fastenc.gemm(x, weight.t(), bias)


def linear_in_one_order(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear`, whose sums have one order for any number of rows.

    This holds in inference in float32 and bfloat16 on a CPU with vector instructions. Our kernel then computes the
    product, although PyTorch's may be a little faster.
    """
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or in_forward_mode()
    on_cpu = x.device.type == "cpu" and x.dim() == 2 and x.dtype == weight.dtype
    has_kernel = on_cpu and x.dtype in (torch.float32, torch.bfloat16)
    if (
        plain
        or not has_vectors()
        or not has_kernel
        or 0 in x.shape
        or dispatch.autocast_dtype("cpu")
    ):
        return linear(x, weight, bias)
    return torch.ops.fastenc.gemm(x, weight.t(), bias)


def _batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Without gradients. Raises: ValueError for a device or dtype without a kernel."""
    if (dtype := dispatch.autocast_dtype(x.device.type)) is not None:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    dispatch.choose("batch_invariant_linear", "triton", x)
    y = torch.ops.fastenc.batch_invariant_linear(x.flatten(0, -2), weight, bias)
    return y.unflatten(0, x.shape[:-1])


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """a b + bias, or a b + added; not differentiable.

    Args:
        a: (rows, inner); b: (inner, columns), dtype of a. Either may be a transposed view.
        bias: (columns,); added: contiguous (rows, columns), which is overwritten with the result.
        dtype: wanted for a result without a bias. float32 from low precision saves a cast where PyTorch has such a
            product, which is on a GPU.
    Returns: (rows, columns), dtype of a, or float32 if that is wanted and there is such a product.
    Numerics: float32 sums, whose order does not depend on the number of threads, and in our kernels not on the number
        of rows. In float32, partial sums of 128 terms each are added in order. On processors with an instruction for
        bfloat16 products, numbers below 2^-126 count as 0.
    """
    if dtype == torch.float32 and _widens(a):
        product = _widening_product(a, b)
        return product if added is None else added.add_(product)
    if added is None:
        if _is_ours(a, b):
            return torch.ops.fastenc.gemm(a, b, bias)
        return F.linear(a, b.t(), bias)
    if _is_ours(a, b) and (a.dtype == torch.float32 or emulates_bfloat16()):
        # bfloat16 is converted, so that the sum is rounded once. PyTorch's own product may be ten times as slow.
        wide = added.float()
        torch.ops.fastenc.gemm_add_(wide, a.float(), b.float())
        return added if wide is added else added.copy_(wide)
    return torch.addmm(added, a, b, out=added)  # FlopCounterMode does not know addmm_


def pack_weight(*weights: Tensor) -> Tensor:
    """Weights (out_features, in_features), stacked along the first dimension, in the order in which our kernels read.

    Returns: float32 (groups, in_features, group size): a group holds that many output features. The last group is
        padded with 0. The group size depends on the instruction set. With AVX512-BF16, weights of bfloat16 stay
        bfloat16, (groups of 32, pairs of in_features, 64), and in_features are padded to a multiple of 32.
    """
    return torch.ops.fastenc.pack_weight(list(weights))


def gemm_packed(a: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """a W^T + bias for a (rows, inner) and packed = pack_weight(W), W (columns, inner).

    Args: a: float32; or bfloat16 if that is the packed weight's dtype, to which float32 is rounded.
    Returns: float32 (rows, columns).
    """
    return torch.ops.fastenc.gemm_packed(a, packed, bias, columns)


def fastest_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """A function that computes a b in the fastest way known here, for measuring a device's peak FLOPs."""
    if a.device.type == "cpu" and a.dtype == torch.bfloat16 and emulates_bfloat16():
        a, b = a.float(), b.float()  # as our kernels compute it
    if _is_ours(a, b) and a.dtype == torch.float32:
        packed = pack_weight(b.t())
        return lambda: gemm_packed(a, packed, None, b.shape[1])
    # The result is overwritten each time: on a CPU, new pages would cost more time than a small product.
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return lambda: out.addmm_(a, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return gemm(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        with dispatch.no_autocast(dy):
            return (
                gemm(dy, weight) if needs_x else None,
                gemm(dy.t(), x) if needs_weight else None,
                column_sum(dy) if needs_bias else None,
            )


def _widens(a: Tensor) -> bool:
    """Whether PyTorch multiplies matrices like a into float32."""
    return (
        a.device.type == "cuda"
        and a.dtype in (torch.bfloat16, torch.float16)
        and "dtype" in torch.ops.aten.mm.overloads()  # since PyTorch 2.8
    )


def _widening_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _is_ours(a: Tensor, b: Tensor) -> bool:
    """Whether the product a b is computed by our kernels."""
    if (
        torch.compiler.is_compiling()
        or reference_reason()
        or not library.HAS_CPP
        or a.device.type != "cpu"
        or a.dtype != b.dtype
        or a.dim() != 2
        or a.shape[1] == 0
    ):
        return False
    if a.dtype == torch.bfloat16:
        return emulates_bfloat16() or _reads_weight_once(a, b)
    return a.dtype == torch.float32 and (cpp_product_is_faster() or _reads_weight_once(a, b))


def _reads_weight_once(a: Tensor, b: Tensor) -> bool:
    return 0 < a.shape[0] <= FEW_ROWS and b.stride(0) == 1 and has_vectors()


@cache
def cpp_product_is_faster() -> bool:
    """Whether the processor has AVX-512 and MKL does not use it; MKL's AVX2 code is not slower than ours."""
    return (
        library.HAS_CPP
        and torch.backends.mkl.is_available()
        and not (built := library._C.build_info())["intel_processor"]
        and built["instruction_set"] == "avx512"
    )


@cache
def has_vectors() -> bool:
    """Whether the processor has vector instructions (AVX2 or more) for which the kernels were compiled."""
    return library.HAS_CPP and library._C.build_info()["instruction_set"] != "baseline"


@cache
def emulates_bfloat16() -> bool:
    """Whether the processor has no bfloat16 units. PyTorch then emulates them; our kernel converts operands once."""
    return library.HAS_CPP and not library._C.build_info()["bfloat16_units"]


@cache
def multiplies_pairs() -> bool:
    """Whether our kernels multiply bfloat16 in pairs, by AVX512-BF16 or AMX, and pack weights of bfloat16 for that."""
    return library.HAS_CPP and library._C.build_info()["bfloat16_panels"]


library.define(
    "gemm(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    lambda a, b, bias: a.new_empty((a.shape[0], b.shape[1])),
)
library.define("gemm_add_(Tensor(a!) c, Tensor a, Tensor b) -> ()", lambda c, a, b: None)
library.define(
    "batch_invariant_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
    triton="linear.linear",
)


def _fake_packed(weights: list[Tensor]) -> Tensor:
    built = library._C.build_info()
    columns, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    if built["bfloat16_panels"] and weights[0].dtype == torch.bfloat16:
        return weights[0].new_empty((-(-columns // 32), -(-depth // 32) * 16, 64))
    width = built["panel_columns"]
    return weights[0].new_empty((-(-columns // width), depth, width), dtype=torch.float32)


library.define("pack_weight(Tensor[] weights) -> Tensor", _fake_packed)
library.define(
    "gemm_packed(Tensor a, Tensor packed, Tensor? bias, int columns) -> Tensor",
    lambda a, packed, bias, columns: a.new_empty((a.shape[0], columns), dtype=torch.float32),
)
