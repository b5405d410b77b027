"""The order of batches: shuffled, sharded over processes, and startable anywhere."""

import random
from collections.abc import Iterator, Sequence


class BatchSampler:
    """Batches of indices, a function of (seed, epoch) alone.

    Shuffled batches are cut from a random order, whatever the lengths: packed batches pay for no padding, so there is
    nothing to win by batches of similar lengths, whose gradients would be noisier. Without shuffling, indices go in
    order. Every process gets the same number of batches: the last ones of an epoch that do not fill all
    processes are left out when shuffling, and given to the first ones otherwise.

    Args:
        lengths: tokens of each example.
        batch_size: examples a batch and process.
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
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}: give more")
        if not lengths:
            raise ValueError("there are no examples to batch, got no lengths: check the data")
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be in [0, {num_shards}), got {shard}")
        self.lengths, self.batch_size = lengths, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.num_shards, self.shard = num_shards, shard
        self._newest: tuple[int, list[list[int]]] | None = None

    def __len__(self) -> int:
        """Batches of an epoch for this process."""
        batches = -(-len(self.lengths) // self.batch_size)
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
        order = list(range(len(self.lengths)))
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(order)
        return [
            order[start : start + self.batch_size]
            for start in range(0, len(order), self.batch_size)
        ]
