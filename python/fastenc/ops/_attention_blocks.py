"""A batch in blocks, the longest sequences first, for attention on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._dispatch import choose
from fastenc.ops._library import define

# The kernels for short sequences take those of at most SHORT tokens, the others blocks of BLOCK.
SHORT, BLOCK = 128, 64


class AttentionBlocks(NamedTuple):
    """A batch in blocks: attention starts a program for each, and those of the longest sequences first.

    Fields:
        every: (blocks, 2) int32, sequence and number of the block of 64 tokens in it. How many there are is not read
            back: entries that are left at the end lie past every sequence's end.
        long: those of sequences with more than 128 tokens.
    """

    every: Tensor
    long: Tensor


def attention_blocks(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> AttentionBlocks | None:
    """A batch's blocks, for all calls of :func:`attention` over it: one launch, and nothing is read back.

    Args: x: (total_tokens, ...), whose device and dtype say which kernel takes the calls.
    Returns: None where the kernel needs none, or all sequences are short or as long as the longest.
    """
    if choose("attention", "auto", x) != "triton":
        return None
    tokens, batch = x.shape[0], cu_seqlens.shape[0] - 1
    if max_seqlen <= SHORT or tokens == batch * max_seqlen:
        return None
    # A sequence's last block has a token at least, and a long one has more than SHORT.
    most = lambda sequences: (tokens + (BLOCK - 1) * sequences) // BLOCK
    sizes = most(batch), most(min(batch, tokens // (SHORT + 1)))
    return AttentionBlocks(*torch.ops.fastenc.attention_blocks(cu_seqlens, *sizes))


def check_blocks(op: str, blocks: AttentionBlocks, q: Tensor) -> None:
    if not isinstance(blocks, AttentionBlocks):
        raise TypeError(
            f"{op}: blocks must be those of attention_blocks, got {type(blocks).__name__}"
        )
    for block in blocks:
        if block.dtype != torch.int32 or block.dim() != 2 or block.shape[1] != 2:
            raise ValueError(
                f"{op}: blocks must be int32 of shape (blocks, 2), got {block.dtype} of shape {tuple(block.shape)}: "
                "make them with attention_blocks"
            )
        _checks.check_device(op, "blocks", block, q)


define(
    "attention_blocks(Tensor cu_seqlens, SymInt every, SymInt long) -> (Tensor every, Tensor long)",
    lambda cu_seqlens, every, long: (
        cu_seqlens.new_empty((every, 2)),
        cu_seqlens.new_empty((long, 2)),
    ),
    triton="attention_blocks.attention_blocks",
)
