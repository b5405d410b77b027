"""The order of batches: shuffled, by language, and startable anywhere."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.data.shuffling import Permutation

POOL = 50  # batches, about, that are cut from the order at once
AHEAD = (
    2**16
)  # places of the order, about, that are computed at once: the cost of a call hardly depends on fewer


class Group(NamedTuple):
    """Examples ``range(start, stop)``, such as those of a language, and their share of the examples of an epoch."""

    start: int
    stop: int
    share: float


class BatchSampler:
    """Batches of indices, a function of (seed, epoch) alone; its memory does not grow with an epoch.

    Shuffled batches are cut from a random order, whatever the lengths: packed batches pay for no padding, so there is
    nothing to win by batches of similar lengths, whose gradients would be noisier. Without shuffling, indices go in
    order.

    With ``groups`` an epoch has as many examples as there are, but of each group its share. A group's examples come
    in random orders, one after another, over the epochs: each is seen once before any is seen again.

    Args:
        lengths: tokens of each example; a tensor (it may be memory-mapped) is not copied.
        batch_size: most examples a batch; None: as many as ``batch_tokens`` holds.
        batch_tokens: most tokens a batch; None: no limit. Beside a batch_size a longer example is a batch
            by itself.
        groups: which together are all examples; their shares add up to 1. Only with ``shuffle``.
    Raises: ValueError for sizes that are not positive, neither of them, an example longer than ``batch_tokens`` alone
        allow, or no examples.
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
            raise ValueError("there are no examples to batch, got no lengths: check the data")
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
            held = max(1, batch_tokens * self.size // int(self.lengths.sum()))
            per_batch = min(per_batch, held)
        self.pool = POOL * per_batch
        self._counts: dict[int, int] = {}

    def count(self, epoch: int) -> int:
        """Batches of an epoch; with ``batch_tokens`` epochs differ a little."""
        if epoch not in self._counts:
            self._counts[epoch] = self._count(epoch)
        return self._counts[epoch]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch from the ``start``-th on."""
        # Pools of as many batches each need not be made to be passed over.
        passed = start // POOL if self.batch_tokens is None else 0
        pools = self._pools(epoch, passed * self.pool)
        every = (batch for indices in pools for batch in self._cut(indices))
        return islice(every, start - passed * POOL, None)

    def _count(self, epoch: int) -> int:
        if self.batch_tokens is None:
            return -(-self.size // self.batch_size)  # type: ignore[operator]
        return sum(len(self._cut(indices)) for indices in self._pools(epoch, 0))

    def _pools(self, epoch: int, first: int) -> Iterator[Tensor]:
        """The epoch's order, from a place on, in parts that batches are cut from."""
        ahead = max(1, AHEAD // self.pool) * self.pool
        for begin in range(first, self.size, ahead):
            places = torch.arange(begin, min(begin + ahead, self.size))
            indices = self._order(epoch, places) if self.shuffle else places
            yield from indices.split(self.pool)

    def _order(self, epoch: int, places: Tensor) -> Tensor:
        """The examples at these places of the epoch's order."""
        drawn = Permutation(self.size, self.seed, "epoch", epoch)(places)
        indices = torch.empty_like(drawn)
        for number, group in enumerate(self.groups):
            own = (drawn >= group.first) & (drawn < group.first + group.quota)
            serial = drawn[own] - group.first + epoch * group.quota
            rounds, place = serial // group.size, serial % group.size
            found = torch.empty_like(place)
            for turn in rounds.unique().tolist():
                order = Permutation(group.size, self.seed, "group", number, turn)
                found[rounds == turn] = order(place[rounds == turn])
            indices[own] = group.start + found
        return indices

    def _cut(self, indices: Tensor) -> list[list[int]]:
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
    """A group's examples from ``start`` on, of which an epoch takes ``quota``, its draws from ``first`` on."""

    start: int
    size: int
    first: int
    quota: int


def _quotas(groups: Sequence[Group], size: int) -> list[_Quota]:
    """Whole numbers of examples that add up to ``size``, nearest to the shares."""
    covered = sum(group.stop - group.start for group in groups)
    if covered != size or not abs(sum(group.share for group in groups) - 1) < 1e-6:
        raise ValueError(
            f"groups must be all {size} examples, with shares that add up to 1, got {covered} examples and "
            f"{sum(group.share for group in groups):g}"
        )
    ends = [round(size * share) for share in accumulate(group.share for group in groups)]
    starts = [0, *ends[:-1]]
    return [
        _Quota(group.start, group.stop - group.start, first, end - first)
        for group, first, end in zip(groups, starts, ends, strict=True)
    ]
