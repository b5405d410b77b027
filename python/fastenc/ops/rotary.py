"""Rotary position embedding of packed queries and keys."""

from typing import Any

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, rotary_table, rotated
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import rotary as reference

declare("rotary", "cpp", "triton")


def rotary(
    x: Tensor, table: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, impl: str = "auto"
) -> Tensor:
    """Rotate each token's heads by the angles of its position in its sequence.

        y[d] = x[d] cos(a_d) - x[d + r/2] sin(a_d)
        y[d + r/2] = x[d + r/2] cos(a_d) + x[d] sin(a_d),  d < r/2, r = rotary_dim; y = x from r on

    Pairs are (d, d + r/2), as in transformers' ``rotate_half``. Positions count from 0 in each sequence.
    :func:`attention` takes the same table and rotates queries and keys as it reads them.

    Args:
        x: (total_tokens, num_heads, head_dim), floating point. It is read in place if its last stride is 1.
        table: float32 (positions, rotary_dim), a row for each position: the cosines of its rotary_dim / 2 angles, then
            their sines. rotary_dim must be even and at most head_dim, positions at least max_seqlen.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        impl: "auto", "cpp", "triton" or "reference".
    Returns: y, shape and dtype of x, contiguous.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. Deterministic: yes. Differentiable: x.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            "rotary: x must be floating point of shape (total_tokens, num_heads, head_dim), "
            f"got {x.dtype} of shape {tuple(x.shape)}: view queries or keys that way"
        )
    checks.check_device("rotary", "cu_seqlens", cu_seqlens, x)
    check_cu_seqlens(cu_seqlens, x.shape[0], max_seqlen)
    check_table("rotary", "table", table, x, max_seqlen)
    if choose("rotary", impl, x) == "reference":
        return reference.rotary(x, table, cu_seqlens)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, table, cu_seqlens, max_seqlen)
    return torch.ops.fastenc.rotary(x, table, cu_seqlens, max_seqlen, False)


def check_table(op: str, name: str, table: Tensor, x: Tensor, max_seqlen: int) -> None:
    """Raise ValueError unless ``table`` is a table of rotary angles for x (..., head_dim)."""
    fits = table.dim() == 2 and table.shape[1] % 2 == 0 and 0 < table.shape[1] <= x.shape[-1]
    if not fits or table.dtype != torch.float32:
        raise ValueError(
            f"{op}: {name} must be float32 of shape (positions, rotary_dim), rotary_dim even and at most the head_dim "
            f"{x.shape[-1]}, got {table.dtype} of shape {tuple(table.shape)}"
        )
    if table.shape[0] < max_seqlen:
        raise ValueError(
            f"{op}: {name} must have a row for each position below max_seqlen {max_seqlen}, got {table.shape[0]}: "
            "build a longer one"
        )
    if table.requires_grad:
        raise ValueError(
            f"{op}: {name} is not differentiable, got a tensor that requires a gradient: detach it"
        )
    checks.check_device(op, name, table, x)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, cu_seqlens, max_seqlen):
        ctx.save_for_backward(table, cu_seqlens)
        ctx.max_seqlen = max_seqlen
        return torch.ops.fastenc.rotary(x, table, cu_seqlens, max_seqlen, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = torch.ops.fastenc.rotary(dy, *ctx.saved_tensors, ctx.max_seqlen, True)
        return dx, None, None, None


define(
    "rotary(Tensor x, Tensor table, Tensor cu_seqlens, SymInt max_seqlen, bool inverse) -> Tensor",
    lambda x, *rest: x.new_empty(x.shape),
    triton="rotary.rotary",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    head_dim = draw.choice(size.head_dim, 16, 34, 48, 128)
    rotary_dim = draw.choice(head_dim, head_dim // 2 // 2 * 2, 2)
    table = rotary_table(size.longest + draw.choice(0, 1, 3), rotary_dim)
    return {
        "x": draw.normal(size.tokens, size.heads, head_dim),
        "table": draw.keep(table),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
    }


declare_case(
    rotary,
    _case_inputs,
    lambda x, table, cu_seqlens, max_seqlen: rotated(x, table, cu_seqlens),
)
