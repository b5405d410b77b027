"""The rows of an embedding table."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops._index_sum import add_sorted, zero_rows
from fastenc.ops.derivatives import in_forward_mode, once_differentiable
from fastenc.ops.library import HAS_CPP


def embedding(input_ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """:func:`torch.nn.functional.embedding`. On a CPU the table's gradient is not filled with zeros.

    PyTorch fills it, which for a large vocabulary takes as long as some layers. Here its memory comes zeroed from the
    system, and only the rows of tokens are written. Rows of the same token are added in their order.

    Args: input_ids: int64 in any shape, in [0, table rows); table: (rows, width).
    Returns: (*input_ids.shape, width).
    """
    if not _has_kernel(table):
        return F.embedding(input_ids, table, padding_idx)
    return _Embedding.apply(table, input_ids, -1 if padding_idx is None else padding_idx)


def _has_kernel(table: Tensor) -> bool:
    """Whether a gradient is wanted that the kernel computes; function transforms see through PyTorch's alone."""
    return (
        not torch.compiler.is_compiling()
        and HAS_CPP
        and table.device.type == "cpu"
        and table.dtype in (torch.float32, torch.bfloat16)
        and torch.is_grad_enabled()
        and table.requires_grad
        and torch._C._functorch.maybe_current_level() is None
        and not in_forward_mode()
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, input_ids: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(input_ids)
        # A tensor of the table's shape without its memory: the gradient does not depend on the table's values.
        ctx.like = table.new_empty(()).expand(table.shape)
        ctx.padding_idx = padding_idx
        return F.embedding(input_ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (input_ids,) = ctx.saved_tensors
        gradient = zero_rows(ctx.like)
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        add_sorted(gradient, rows, input_ids, 0, ctx.padding_idx)
        return gradient, None, None
