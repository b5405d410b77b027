"""Tables of a batch's blocks of tokens, the longest sequences first, for attention on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.dispatch import choose
from fastenc.ops.library import define

# Tokens of the longest sequence that the kernels for short sequences take, and tokens of a block of the other kernels.
SHORT, BLOCK = 128, 64


class AttentionBlocks(NamedTuple):
    """Tables of the blocks of 64 tokens for which attention starts programs, the longest sequences first.

    Fields:
        all_blocks: int32 (rows, 2), in each row a sequence and the index of a block in it. The number of blocks is not
            read back from the device: a table has a row for each block that there can be, and unused rows name blocks
            past every sequence's end.
        long_blocks: the same, of the sequences with more than 128 tokens.
    """

    all_blocks: Tensor
    long_blocks: Tensor


def attention_blocks(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> AttentionBlocks | None:
    """The tables of a batch, for all calls of :func:`attention` over it. One launch makes them.

    Args: x: (total_tokens, ...), whose device and dtype say which kernel takes the calls.
    Returns: None if that kernel takes no tables, or if all sequences have at most 128 tokens or one length.
    """
    if choose("attention", "auto", x) != "triton":
        return None
    tokens, batch = x.shape[0], cu_seqlens.shape[0] - 1
    if max_seqlen <= SHORT or tokens == batch * max_seqlen:
        return None
    # There are most blocks where every sequence's last block has one token. A long sequence has more than SHORT tokens.
    max_blocks = lambda sequences: (tokens + (BLOCK - 1) * sequences) // BLOCK
    rows, long_rows = max_blocks(batch), max_blocks(min(batch, tokens // (SHORT + 1)))
    return AttentionBlocks(*torch.ops.fastenc.attention_blocks(cu_seqlens, rows, long_rows))


def check_blocks(op: str, blocks: AttentionBlocks, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``blocks`` are two int32 tables (rows, 2) on q's device."""
    if not isinstance(blocks, AttentionBlocks):
        raise TypeError(
            f"{op}: blocks must be AttentionBlocks, got {type(blocks).__name__}: make them with attention_blocks"
        )
    for table in blocks:
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[1] != 2:
            raise ValueError(
                f"{op}: blocks must be int32 of shape (blocks, 2), got {table.dtype} of shape {tuple(table.shape)}: "
                "make them with attention_blocks"
            )
        checks.check_device(op, "blocks", table, q)


define(
    "attention_blocks(Tensor cu_seqlens, SymInt rows, SymInt long_rows) -> (Tensor all_blocks, Tensor long_blocks)",
    lambda cu_seqlens, rows, long_rows: (
        cu_seqlens.new_empty((rows, 2)),
        cu_seqlens.new_empty((long_rows, 2)),
    ),
    triton="attention_blocks.attention_blocks",
)
