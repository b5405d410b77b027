"""Micro-batches and steps, counted by hand."""

import pytest

from fastenc.data import BatchSampler
from fastenc.train.schedule import Schedule


@pytest.mark.parametrize(
    ("micro_batches", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])]
)
def test_a_step_has_its_micro_batches_and_an_epochs_last_one_the_rest(micro_batches, sizes):
    """Ten examples in batches of two."""
    schedule = Schedule(BatchSampler([3] * 10, 2, shuffle=False), micro_batches)
    assert schedule.steps(0) == schedule.steps(1) == len(sizes)
    batches = schedule.batches_from(0)
    for _ in range(2):
        epoch = [next(batches) for _ in sizes]
        assert [len(step) for step in epoch] == sizes
        assert [i for step in epoch for batch in step for i in batch] == [*range(10)]
    resumed, later = schedule.batches_from(1), [*sizes[1:], *sizes, *sizes]
    assert [len(next(resumed)) for _ in later] == later
    last = len(sizes)
    assert [schedule.position(n) for n in (0, last, last + 1)] == [(0, 0), (0, last), (1, 1)]


def test_each_epoch_has_its_own_number_of_steps():
    """Batches of at most 6 tokens of lengths 4, 3, 2, 2, 1: their number depends on the order."""
    lengths = [4, 3, 2, 2, 1]
    sampler = BatchSampler(lengths, batch_tokens=6, shuffle=True)
    schedule, counts = Schedule(sampler, 1), []
    for epoch in range(20):
        number = tokens = 0
        for index in (i for batch in sampler.epoch(epoch) for i in batch):
            if not number or tokens + lengths[index] > 6:
                number, tokens = number + 1, 0
            tokens += lengths[index]
        counts.append(number)
        assert schedule.steps(epoch) == number
    assert len(set(counts)) > 1
    step = sum(counts[:7]) + 1
    assert schedule.position(step) == (7, 1)
    assert next(schedule.batches_from(step)) == [list(sampler.epoch(7))[1]]
