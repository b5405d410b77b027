"""Sums of the rows that share an index: the gradient of an embedding table of few rows."""

import torch
from torch import Tensor

from fastenc.ops.library import define, library

# Bytes of an element → the largest table for which index_sum is faster than add_sorted. The GPU kernel multiplies by a
# one-hot matrix, whose cost grows with the rows of the table; the cost of sorting does not. A product of float32 takes
# three of TF32: for 512 positions and 65,536 tokens that was 2.3 ms on an H200.
MAX_SIZE = {2: 1024, 4: 64}


def index_sum(rows: Tensor, index: Tensor, size: int, offset: int, padding_idx: int) -> Tensor:
    """out[r] = sum of rows[i] over index[i] + offset = r, and 0 at ``padding_idx``; not differentiable.

    Args:
        rows: (count, width), floating point, on a device and in a dtype that the kernels take.
        index: count integers (int64) in any shape; index + offset lies in [0, size).
        size: number of rows of the result; add_sorted is faster where it is above MAX_SIZE.
        padding_idx: a row that stays 0, or -1.
    Returns: (size, width), dtype of rows.
    Numerics: float32 sums, in an order that depends on the shapes and, on a CPU, on the indices. On a GPU, an input row
        that is not finite also makes up to 127 neighbours of its row in the result NaN.
    """
    return torch.ops.fastenc.index_sum(rows, index, size, offset, padding_idx)


def add_sorted(table: Tensor, rows: Tensor, index: Tensor, offset: int, padding_idx: int) -> None:
    """table[index + offset] += rows, in place; rows with the same index are added in their order.

    Args:
        table: contiguous (table rows, width); rows: (count, width); index: count integers (int64) in any shape.
        padding_idx: a row of the table that is left as it is, or -1.
    """
    # A GPU sorts eight bits at a time: two passes for 16 bits, eight for 64.
    narrow = torch.int16 if table.shape[0] <= 2**15 else torch.int32
    sorted_index, order = index.flatten().to(narrow).sort(stable=True)
    torch.ops.fastenc.add_rows_(table, rows, sorted_index.long(), order, offset, padding_idx)


def zero_rows(table: Tensor) -> Tensor:
    """Contiguous zeros of the table's shape, as ``add_rows_`` needs them, also if the table is not contiguous."""
    if table.device.type == "cpu":
        return torch.ops.fastenc.zero_table(table)
    return torch.zeros_like(table, memory_format=torch.contiguous_format)


def _on_cpu(rows: Tensor, index: Tensor, size: int, offset: int, padding_idx: int) -> Tensor:
    out = rows.new_zeros((size, rows.shape[1]))
    add_sorted(out, rows, index, offset, padding_idx)
    return out


define(
    "add_rows_(Tensor(a!) table, Tensor rows, Tensor sorted_ids, Tensor order, int offset, int padding_idx) -> ()",
    lambda table, rows, sorted_ids, order, offset, padding_idx: None,
    triton="add_rows.add_rows_in_place",
)
define(
    "index_sum(Tensor rows, Tensor index, int size, int offset, int padding_idx) -> Tensor",
    lambda rows, index, size, offset, padding_idx: rows.new_empty((size, rows.shape[1])),
    triton="index_sum.index_sum",
)
# Contiguous zeros of the table's shape. A step writes few rows of a table of words. The others are mapped when an
# optimiser reads them: to fill them would cost more than the rest of the embeddings' backward.
define(
    "zero_table(Tensor table) -> Tensor",
    lambda table: torch.empty_like(table, memory_format=torch.contiguous_format),
)
library.impl("index_sum", _on_cpu, "CPU")
