"""The order of batches: shuffled, sharded over processes, and startable anywhere."""

import random
from collections.abc import Iterator, Sequence


class BatchSampler:
    """Batches of indices, a function of (seed, epoch) alone.

    Shuffled batches are cut from a random order, whatever the lengths: packed batches pay for no padding, so there is
    nothing to win by batches of similar lengths, whose gradients would be noisier. Without shuffling, indices go in
    order. Every process gets the same number of batches: the last ones of an epoch that do not fill all
    processes are left out when shuffling, and given to the first ones otherwise.

    With ``max_tokens`` another order would give another number of batches; so they are formed once, from the seed
    alone, and every epoch shuffles those.

    Args:
        lengths: tokens of each example.
        batch_size: most examples a batch and process.
        max_tokens: most tokens a batch, in whole examples: a longer one is a batch by itself. None: no limit.
        num_shards, shard: number of processes, and this one's place.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        num_shards: int = 1,
        shard: int = 0,
        max_tokens: int | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}: give more")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}: give more")
        if not lengths:
            raise ValueError("there are no examples to batch, got no lengths: check the data")
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be in [0, {num_shards}), got {shard}")
        self.lengths, self.batch_size = lengths, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.num_shards, self.shard = num_shards, shard
        self.max_tokens = max_tokens
        self._formed = None if max_tokens is None else self._cut(self._order(str(seed)))
        self._newest: tuple[int, list[list[int]]] | None = None

    def __len__(self) -> int:
        """Batches of an epoch for this process."""
        batches = -(-len(self.lengths) // self.batch_size)
        if self._formed is not None:
            batches = len(self._formed)
        if not self.shuffle:
            return len(range(self.shard, batches, self.num_shards))
        return max(1, batches // self.num_shards)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch from the ``start``-th on."""
        # A training loop asks again for the same epoch at every step.
        if self._newest is None or self._newest[0] != epoch:
            self._newest = epoch, self._batches(epoch)
        batches = self._newest[1]
        if self.shuffle and len(batches) < self.num_shards:
            batches = [batches[place % len(batches)] for place in range(self.num_shards)]
        own = batches[self.shard :: self.num_shards][: len(self)]
        return iter(own[start:])

    def _batches(self, epoch: int) -> list[list[int]]:
        draw = f"{self.seed} {epoch}"
        if self._formed is None:
            return self._cut(self._order(draw))
        batches = [*self._formed]
        if self.shuffle:
            random.Random(draw).shuffle(batches)
        return batches

    def _order(self, draw: str) -> list[int]:
        order = list(range(len(self.lengths)))
        if self.shuffle:
            random.Random(draw).shuffle(order)
        return order

    def _cut(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        tokens = 0
        for index in order:
            tokens += self.lengths[index]
            full = not batches or len(batches[-1]) == self.batch_size
            if full or (self.max_tokens is not None and tokens > self.max_tokens):
                batches.append([])
                tokens = self.lengths[index]
            batches[-1].append(index)
        return batches
