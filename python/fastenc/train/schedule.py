"""Which micro-batches belong to which optimiser step."""

from collections.abc import Iterator
from itertools import count, islice

from fastenc.data import BatchSampler


class Schedule:
    """The optimiser steps of a run as micro-batches of example indices.

    All processes have the same order of micro-batches, whatever their number. No step crosses the end of an epoch. The
    last step of an epoch may have fewer micro-batches.

    Args: micro_batches: number of micro-batches of a step, those of all processes together.
    """

    def __init__(self, sampler: BatchSampler, micro_batches: int):
        self.sampler, self.micro_batches = sampler, micro_batches

    def steps(self, epoch: int) -> int:
        """Number of steps in an epoch."""
        return -(-self.sampler.count(epoch) // self.micro_batches)

    def position(self, step: int) -> tuple[int, int]:
        """After ``step`` steps: (epoch of the last one, number of this epoch's steps that are done)."""
        epoch = 0
        while step > (steps := self.steps(epoch)):
            epoch, step = epoch + 1, step - steps
        return epoch, step

    def batches_from(self, step: int) -> Iterator[list[list[int]]]:
        """The micro-batches of each step after the first ``step`` steps. The iterator has no end."""
        first, done = self.position(step)
        start = done * self.micro_batches
        for epoch in count(first):
            batches = self.sampler.epoch(epoch, start if epoch == first else 0)
            while of_step := list(islice(batches, self.micro_batches)):
                yield of_step
