"""Pads packed batches to one of a few shapes, so that a CUDA graph of a shape serves many batches."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.packing import PackedBatch

# Smallest total_tokens and max_seqlen of a bucket; smaller ones would not be faster.
MIN_TOKENS, MIN_LENGTH = 32, 64


class Bucket(NamedTuple):
    """The shape of a padded batch."""

    total_tokens: int
    num_sequences: int
    max_seqlen: int


def sizes(per_doubling: int = 2) -> Iterator[int]:
    """Ascending sizes, ``per_doubling`` from a power of two to the next.

    2: 2, 3, 4, 6, 8, 12, 16, …; 8: 8, 9, …, 15, 16, 18, …
    """
    size = per_doubling
    while True:
        yield from range(size, 2 * size, size // per_doubling)
        size *= 2


def bucket_of(
    batch: PackedBatch,
    max_seqlen: int,
    max_tokens: int,
    *,
    per_doubling: int = 2,
    may_be_full: bool = False,
) -> Bucket | None:
    """The smallest bucket for the batch and at least one sequence of padding.

    None if it exceeds ``max_tokens``, and for a batch with global tokens, whose number is another one in each batch.

    The padding forms separate sequences, which are not empty and not longer than ``max_seqlen``. A bucket has more
    tokens than sequences, so that the first dimension of a result shows whether it has a row per token or per sequence.

    Args:
        max_seqlen: the longest sequence that the model takes.
        per_doubling: number of sizes of total_tokens from one power of two to the next.
        may_be_full: a batch with exactly a bucket's shape takes that bucket without padding.
    """
    tokens, sequences = batch.total_tokens, batch.num_sequences
    if batch.global_tokens is not None:
        return None
    for capacity in sizes():
        extra = capacity - sequences
        if extra < 0 or (extra == 0 and not may_be_full):
            continue
        least = max(tokens + extra, capacity + 1)
        if least > max_tokens:
            return None
        room = min(max_tokens, at_least(max(least, MIN_TOKENS), per_doubling))
        if extra == 0 and room != tokens:
            continue
        longest = max(batch.max_seqlen, -(-(room - tokens) // max(extra, 1)))
        if longest <= max_seqlen:
            length = min(max_seqlen, at_least(max(longest, MIN_LENGTH)))
            return Bucket(room, capacity, length)
    raise AssertionError("sizes() has no end")


def at_least(number: int, per_doubling: int = 2) -> int:
    """The smallest of :func:`sizes` that is at least ``number``."""
    return next(size for size in sizes(per_doubling) if size >= number)


def pad_to(batch: PackedBatch, bucket: Bucket, pad_token_id: int) -> PackedBatch:
    """The batch with sequences of padding tokens appended, of about equal lengths, up to the bucket's shape."""
    more_tokens = bucket.total_tokens - batch.total_tokens
    more_sequences = bucket.num_sequences - batch.num_sequences
    steps = torch.arange(1, more_sequences + 1, device=batch.cu_seqlens.device)
    ends = batch.total_tokens + steps * more_tokens // max(more_sequences, 1)
    fill = lambda values, value: F.pad(values, (0, more_tokens), value=value)
    types = batch.token_type_ids
    return PackedBatch(
        input_ids=fill(batch.input_ids, pad_token_id),
        cu_seqlens=torch.cat((batch.cu_seqlens, ends.int())),
        max_seqlen=bucket.max_seqlen,
        position_ids=fill(batch.position_ids, 0),
        token_type_ids=None if types is None else fill(types, 0),
    )


def cut_to(value: Tensor, bucket: Bucket, batch: PackedBatch) -> Tensor:
    """A copy of a result without the rows of padding; ``value`` has a row per token or per sequence of the bucket."""
    rows = {
        bucket.total_tokens: batch.total_tokens,
        bucket.num_sequences: batch.num_sequences,
    }
    return value[: rows[value.shape[0]]].clone()
