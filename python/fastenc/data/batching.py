"""The order of batches: shuffled or not, with a share for each language. An epoch can start at any of its batches."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.data.shuffling import Permutation

POOL = 50  # an epoch's order is cut into batches in pools of about this many batches
# About this many entries of the order are computed in one call. Fewer would hardly make a call cheaper.
ENTRIES_AT_ONCE = 2**16


class Group(NamedTuple):
    """The examples with indices [start, stop), such as those of one language, and their share of an epoch."""

    start: int
    stop: int
    share: float


class BatchSampler:
    """Batches of example indices. They depend on the lengths, the groups, the seed and the epoch only.

    The shuffled order is computed on demand, so an epoch needs no list of all its indices in memory.

    Shuffling ignores the lengths. Packed batches contain no padding, so batches of similar lengths would save nothing,
    and their gradients would be noisier. Without shuffling, the indices ascend.

    With ``groups``, an epoch has as many examples as the data set, and each group gets its share of them. A group's
    examples are in random order. All of them are used once, over as many epochs as this takes, before any is used
    again.

    Args:
        lengths: number of tokens of each example. A tensor is not copied and may be memory-mapped.
        batch_size: largest number of examples in a batch; None: as many as ``batch_tokens`` allows.
        batch_tokens: largest number of tokens in a batch; None: no limit. If batch_size is given too, an example that
            is longer than ``batch_tokens`` becomes a batch by itself.
        shuffle: whether the indices are in random order.
        groups: disjoint ranges that cover all examples; their shares add up to 1. Only with ``shuffle``.
        seed: seed of the random order.
    Raises: ValueError if batch_size or batch_tokens is not positive, if both are None, if an example is longer than
        ``batch_tokens`` and batch_size is None, if there are no examples, or if the groups do not cover all examples
        with shares that add up to 1.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int | None = None,
        *,
        shuffle: bool,
        batch_tokens: int | None = None,
        groups: Sequence[Group] | None = None,
        seed: int = 0,
    ):
        if batch_size is None and batch_tokens is None:
            raise ValueError("give batch_size, batch_tokens or both, got neither")
        for name, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}: give more")
        if not len(lengths):
            raise ValueError(
                "lengths must hold the length of at least one example, got none: give examples"
            )
        self.lengths = torch.as_tensor(lengths)
        self.size = len(self.lengths)
        longest = int(self.lengths.max())
        if batch_size is None and batch_tokens is not None and longest > batch_tokens:
            raise ValueError(
                f"batch_tokens must hold the longest example, of {longest} tokens, got {batch_tokens}: give more"
            )
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.shuffle, self.seed = shuffle, seed
        self.groups = _quotas(groups or [Group(0, self.size, 1.0)], self.size)
        per_batch = self.size if batch_size is None else batch_size
        if batch_tokens is not None:
            average = max(1, batch_tokens * self.size // int(self.lengths.sum()))
            per_batch = min(per_batch, average)
        self.pool = POOL * per_batch
        self._counts: dict[int, int] = {}

    def count(self, epoch: int) -> int:
        """Number of batches in an epoch. With ``batch_tokens`` it differs a little between epochs."""
        if epoch not in self._counts:
            self._counts[epoch] = self._count(epoch)
        return self._counts[epoch]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch, from batch number ``start`` (from 0) on."""
        # With batch_size alone, every pool has POOL batches, so whole pools are skipped without computing them.
        skipped = start // POOL if self.batch_tokens is None else 0
        pools = self._pools(epoch, skipped * self.pool)
        batches = (batch for indices in pools for batch in self._cut(indices))
        return islice(batches, start - skipped * POOL, None)

    def _count(self, epoch: int) -> int:
        if self.batch_tokens is None:
            return -(-self.size // self.batch_size)  # type: ignore[operator]
        return sum(len(self._cut(indices)) for indices in self._pools(epoch, 0))

    def _pools(self, epoch: int, first: int) -> Iterator[Tensor]:
        """The epoch's order from entry ``first`` on, in pools from which batches are cut."""
        at_once = max(1, ENTRIES_AT_ONCE // self.pool) * self.pool
        for begin in range(first, self.size, at_once):
            entries = torch.arange(begin, min(begin + at_once, self.size))
            indices = self._order(epoch, entries) if self.shuffle else entries
            yield from indices.split(self.pool)

    def _order(self, epoch: int, entries: Tensor) -> Tensor:
        """The example indices at these entries of the epoch's order: int64, of the same shape."""
        shuffled = Permutation(self.size, self.seed, "epoch", epoch)(entries)
        indices = torch.empty_like(shuffled)
        for number, group in enumerate(self.groups):
            in_group = (shuffled >= group.first) & (shuffled < group.first + group.quota)
            # Counts the group's examples since epoch 0. Each pass over the group has its own permutation.
            serial = shuffled[in_group] - group.first + epoch * group.quota
            passes, entry = serial // group.size, serial % group.size
            drawn = torch.empty_like(entry)
            for each in passes.unique().tolist():
                order = Permutation(group.size, self.seed, "group", number, each)
                drawn[passes == each] = order(entry[passes == each])
            indices[in_group] = group.start + drawn
        return indices

    def _cut(self, indices: Tensor) -> list[list[int]]:
        """Consecutive batches that hold as many of the indices as the limits allow."""
        chosen = indices.tolist()
        if self.batch_tokens is None:
            size: int = self.batch_size  # type: ignore[assignment]
            return [chosen[start : start + size] for start in range(0, len(chosen), size)]
        ends = self.lengths[indices].cumsum(0).tolist()
        most = len(chosen) if self.batch_size is None else self.batch_size
        batches: list[list[int]] = []
        start = tokens = 0
        while start < len(chosen):
            fits = bisect_right(ends, tokens + self.batch_tokens, start)
            stop = max(start + 1, min(fits, start + most))
            batches.append(chosen[start:stop])
            start, tokens = stop, ends[stop - 1]
        return batches


@dataclass(frozen=True)
class _Quota:
    """A group of ``size`` examples that begin at index ``start``. An epoch uses ``quota`` of them.

    The group's examples are the values [first, first + quota) of the epoch's permutation.
    """

    start: int
    size: int
    first: int
    quota: int


def _quotas(groups: Sequence[Group], size: int) -> list[_Quota]:
    """Whole numbers of examples, close to the shares, that add up to ``size``."""
    covered = sum(group.stop - group.start for group in groups)
    if covered != size or not abs(sum(group.share for group in groups) - 1) < 1e-6:
        raise ValueError(
            f"groups must cover all {size} examples and their shares must add up to 1, got {covered} examples and a "
            f"sum of {sum(group.share for group in groups):g}: correct the groups"
        )
    ends = [round(size * share) for share in accumulate(group.share for group in groups)]
    starts = [0, *ends[:-1]]
    return [
        _Quota(group.start, group.stop - group.start, first, end - first)
        for group, first, end in zip(groups, starts, ends, strict=True)
    ]
