"""Documents whose chunks are the sequences of a packed batch, and groups of sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from fastenc._base.transfer import send
from fastenc.packing.batch import PackedBatch


@dataclass(frozen=True)
class Documents:
    """Documents whose chunks are the sequences of a packed batch.

    Fields (B = sequences, D = documents):
        cu_chunks: (D+1,) int32, offsets of the documents among the sequences, from 0 to B.
        max_chunks: the largest number of chunks of a document, a host int.
        position_ids: (B,) int64, position of each chunk in its document, from 0.
        groups: (sequences, tokens, longest sequence) of each group, host ints for :meth:`PackedBatch.split`. Inference
            encodes one group at a time.
    """

    cu_chunks: Tensor
    max_chunks: int
    position_ids: Tensor
    groups: tuple[tuple[int, int, int], ...]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Documents":
        """The same documents with their tensors on ``device``."""
        move = lambda tensor: send(tensor, device, non_blocking)
        return replace(self, cu_chunks=move(self.cu_chunks), position_ids=move(self.position_ids))


def pack_documents(
    chunk_lengths: Sequence[Sequence[int]], tokens_at_once: int = 16_384
) -> Documents:
    """The :class:`Documents` of a batch that holds the chunks in the given order.

    Args:
        chunk_lengths: for each document, the numbers of tokens of its chunks.
        tokens_at_once: largest number of tokens in a group; a single chunk may have more.
    Raises: ValueError for a document without chunks.
    """
    counts = [len(lengths) for lengths in chunk_lengths]
    if 0 in counts:
        raise ValueError(
            f"a document must have at least one chunk, document {counts.index(0)} has none: leave it out of the batch"
        )
    return Documents(
        cu_chunks=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        max_chunks=max(counts, default=0),
        position_ids=torch.tensor([i for n in counts for i in range(n)], dtype=torch.int64),
        groups=token_groups(chain.from_iterable(chunk_lengths), tokens_at_once),
    )


def token_groups(lengths: Iterable[int], tokens_at_once: int) -> tuple[tuple[int, int, int], ...]:
    """Consecutive sequences in groups of at most ``tokens_at_once`` tokens, for :meth:`PackedBatch.split`.

    A sequence that is longer is a group by itself.
    Returns: (sequences, tokens, longest sequence) of each group.
    """
    groups: list[tuple[int, int, int]] = []
    sequences = tokens = longest = 0
    for length in lengths:
        if sequences and tokens + length > tokens_at_once:
            groups.append((sequences, tokens, longest))
            sequences = tokens = longest = 0
        sequences, tokens, longest = sequences + 1, tokens + length, max(longest, length)
    if sequences:
        groups.append((sequences, tokens, longest))
    return tuple(groups)


def single_chunks(batch: PackedBatch) -> Documents:
    """:class:`Documents` in which each sequence of a batch is a document with one chunk, all in one group."""
    count, device = batch.num_sequences, batch.cu_seqlens.device
    return Documents(
        cu_chunks=torch.arange(count + 1, dtype=torch.int32, device=device),
        max_chunks=min(count, 1),
        position_ids=torch.zeros(count, dtype=torch.int64, device=device),
        groups=((count, batch.total_tokens, batch.max_seqlen),),
    )
