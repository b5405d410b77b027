"""One vector per sequence from packed token vectors."""

from typing import Any

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, packed_inputs, sequences
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import segment_pool as reference

declare("segment_pool", "cpp", "triton")

MODES = ("cls", "mean", "max")


def segment_pool(
    x: Tensor, cu_seqlens: Tensor, mode: str = "mean", *, impl: str = "auto"
) -> Tensor:
    """First token, mean or maximum of each sequence of a packed batch.

        y[b, c] = x[first_b, c]   |   sum_t x[t, c] / length_b   |   max_t x[t, c],   t over sequence b

    Args:
        x: (total_tokens, hidden_size), floating point.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        mode: "cls" (the first token), "mean" or "max".
        impl: "auto", "cpp", "triton" or "reference".
    Returns: (batch, hidden_size), dtype of x; 0 for an empty sequence.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: the mean is summed in fp32. The maximum of values with a NaN is NaN. Deterministic: yes.
    Differentiable: x. The gradient of a maximum goes to the first token that has it, as in ``torch.max(x, dim)``.
    Source: Reimers and Gurevych 2019, arXiv:1908.10084.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            "segment_pool: x must be floating point of shape (total_tokens, hidden_size), "
            f"got {x.dtype} of shape {tuple(x.shape)}: pack the tokens first"
        )
    checks.check_device("segment_pool", "cu_seqlens", cu_seqlens, x)
    check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[0])
    if mode not in MODES:
        raise ValueError(f"segment_pool: mode must be one of {MODES}, got {mode!r}")
    if choose("segment_pool", impl, x) == "reference":
        return reference.segment_pool(x, cu_seqlens, mode)
    if torch.is_grad_enabled() and x.requires_grad:
        return _SegmentPool.apply(x, cu_seqlens, MODES.index(mode))
    return torch.ops.fastenc.segment_pool_fwd(x, cu_seqlens, MODES.index(mode))[0]


class _SegmentPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cu_seqlens, mode):
        y, argmax = torch.ops.fastenc.segment_pool_fwd(x, cu_seqlens, mode)
        ctx.save_for_backward(argmax, cu_seqlens)
        ctx.total_tokens, ctx.mode = x.shape[0], mode
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = torch.ops.fastenc.segment_pool_bwd(dy, *ctx.saved_tensors, ctx.total_tokens, ctx.mode)
        return dx, None, None


def _fake_forward(x, cu_seqlens, mode):
    y = x.new_empty((cu_seqlens.shape[0] - 1, x.shape[1]))
    argmax = torch.empty_like(y, dtype=torch.int32)
    return y, argmax if MODES[mode] == "max" else argmax.new_empty((0,))


def _fake_backward(dy, argmax, cu_seqlens, total_tokens, mode):
    return dy.new_empty((total_tokens, dy.shape[1]))


define(
    "segment_pool_fwd(Tensor x, Tensor cu_seqlens, int mode) -> (Tensor, Tensor)",
    _fake_forward,
    triton="segment_pool.segment_pool_forward",
)
define(
    "segment_pool_bwd(Tensor dy, Tensor argmax, Tensor cu_seqlens, SymInt total_tokens, int mode) -> Tensor",
    _fake_backward,
    triton="segment_pool.segment_pool_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {**packed_inputs(size, draw), "mode": draw.choice("mean", "max", "cls")}


def _plain(x: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    of_one = {"mean": lambda rows: rows.mean(0), "max": lambda rows: rows.max(0).values}[mode]
    zeros = x.new_zeros(x.shape[1])
    return torch.stack([of_one(p) if len(p) else zeros for p in sequences(x, cu_seqlens)])


declare_case(segment_pool, _case_inputs, _plain)
declare_case(
    segment_pool,
    lambda size, draw: {**packed_inputs(size, draw), "mode": "max"},
    _plain,
    "max",
)
