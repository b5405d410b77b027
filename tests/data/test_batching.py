import random
from collections import Counter

import pytest

from fastenc.data import BatchSampler, Group

DRAW = random.Random(0)
LENGTHS = [DRAW.randint(3, 100) for _ in range(1003)]


def test_every_example_once_an_epoch_in_a_random_order():
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    batches = list(sampler.epoch(0))
    assert len(batches) == sampler.count(0) == 126
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(1003)) != order


def test_order_depends_on_seed_and_epoch_alone_and_starts_anywhere():
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    again = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    assert list(again.epoch(3)) == list(sampler.epoch(3)) != list(sampler.epoch(4))
    assert list(BatchSampler(LENGTHS, 8, shuffle=True, seed=2).epoch(3)) != list(sampler.epoch(3))
    for start in (0, 49, 50, 70, 126):
        assert list(sampler.epoch(3, start=start)) == list(sampler.epoch(3))[start:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_limit_of_tokens_beside_one_of_examples(shuffle):
    sampler = BatchSampler(LENGTHS, 8, shuffle=shuffle, seed=1, batch_tokens=90)
    batches = list(sampler.epoch(1))
    assert len(batches) == sampler.count(1)
    assert sorted(index for batch in batches for index in batch) == list(range(1003))
    tokens = [sum(LENGTHS[i] for i in batch) for batch in batches]
    assert all(n <= 90 or len(batch) == 1 for n, batch in zip(tokens, batches, strict=True))
    assert max(tokens) > 90 and 1 < max(map(len, batches)) <= 8, "longer examples are alone"
    assert list(sampler.epoch(1, start=9)) == batches[9:]


def test_a_limit_that_no_batch_reaches_changes_nothing():
    limited = BatchSampler(LENGTHS, 8, shuffle=True, seed=1, batch_tokens=8 * 100)
    free = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    assert list(limited.epoch(0)) == list(free.epoch(0))


def test_batches_by_tokens_hold_what_fits():
    sampler = BatchSampler(LENGTHS, batch_tokens=500, shuffle=True, seed=1)
    batches = list(sampler.epoch(2))
    assert sorted(index for batch in batches for index in batch) == list(range(1003))
    sizes = [sum(LENGTHS[i] for i in batch) for batch in batches]
    assert max(sizes) <= 500 and sum(sizes) / len(sizes) > 420
    assert len(batches) == sampler.count(2)
    assert list(sampler.epoch(2, start=33)) == batches[33:]
    ordered = BatchSampler(LENGTHS, batch_tokens=500, shuffle=False)
    assert [i for batch in ordered.epoch(0) for i in batch] == list(range(1003))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_batch_is_full_with_exactly_its_tokens(batch_size):
    """Each batch holds as many of the next examples as fit: of 6 tokens, 3 examples of 2 or one of 6."""
    lengths = [2, 2, 2, 6, 1, 5, 1, 1, 1, 1, 1, 4, 3, 3, 6]
    expected, free = [], (0, 0)
    for index, length in enumerate(lengths):
        if length <= free[0] and free[1]:
            expected[-1].append(index)
        else:
            expected.append([index])
            free = (6, batch_size or len(lengths))
        free = (free[0] - length, free[1] - 1)
    sampler = BatchSampler(lengths, batch_size, batch_tokens=6, shuffle=False)
    assert list(sampler.epoch(0)) == expected


def test_orders_longer_than_what_is_computed_at_once():
    """150,000 examples, 2^16 places computed at a time: each example comes once, from any start in the same order."""
    lengths = [DRAW.randint(3, 100) for _ in range(150_000)]
    for limits in ({"batch_size": 32}, {"batch_tokens": 2000}):
        sampler = BatchSampler(lengths, shuffle=True, seed=1, **limits)
        batches = list(sampler.epoch(0))
        assert sampler.count(0) == len(batches)
        assert sorted(index for batch in batches for index in batch) == list(range(150_000))
        for start in (1, 1700, 2048, len(batches) - 1):
            assert list(sampler.epoch(0, start=start)) == batches[start:]


def test_groups_have_their_shares_and_no_example_comes_again_before_the_others():
    groups = [Group(0, 900, 0.6), Group(900, 1000, 0.35), Group(1000, 1003, 0.05)]
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, groups=groups, seed=1)
    seen = Counter()
    for epoch in range(7):
        drawn = [index for batch in sampler.epoch(epoch) for index in batch]
        assert len(drawn) == 1003
        for group in groups:
            inside = sum(group.start <= index < group.stop for index in drawn)
            assert abs(inside - group.share * 1003) <= 1
        seen.update(drawn)
        for group in groups:
            times = [seen[index] for index in range(group.start, group.stop)]
            assert max(times) - min(times) <= 1
    again = BatchSampler(LENGTHS, 8, shuffle=True, groups=groups, seed=1)
    assert list(again.epoch(5, start=100)) == list(sampler.epoch(5))[100:]


def test_shares_whose_sum_is_rounded_leave_no_example_out():
    """Ten times 0.1 is 0.9999999999999999."""
    groups = [Group(10 * i, 10 * i + 10, 0.1) for i in range(10)]
    sampler = BatchSampler([1] * 100, 8, shuffle=True, groups=groups)
    assert sum(group.share for group in groups) < 1
    for epoch in range(2):
        assert sorted(i for batch in sampler.epoch(epoch) for i in batch) == [*range(100)]


def test_the_part_of_a_group_in_an_epoch_is_random_in_each_group_pass_and_run():
    """Two independent halves of 100 examples share 25, with a standard deviation of 2.5."""
    groups = [Group(0, 100, 1 / 6), Group(100, 200, 1 / 6), Group(200, 300, 4 / 6)]

    def order(epoch=0, seed=1):
        sampler = BatchSampler([1] * 300, 8, shuffle=True, groups=groups, seed=seed)
        return [index for batch in sampler.epoch(epoch) for index in batch]

    def half(start=0, **options):
        return {index - start for index in order(**options) if 0 <= index - start < 100}

    of_group = lambda indices: [index // 100 for index in indices]
    for other in (order(epoch=1), order(seed=2)):
        assert of_group(order()) != of_group(other)
    for other in (half(start=100), half(epoch=2), half(epoch=3), half(seed=2)):
        assert len(half()) == len(other) == 50
        assert abs(len(half() & other) - 25) < 5 * 2.5


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="batch_size, batch_tokens or both, got neither"):
        BatchSampler(LENGTHS, shuffle=True)
    for name in ("batch_size", "batch_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            BatchSampler(LENGTHS, **{"batch_size": 8, name: 0}, shuffle=True)
    with pytest.raises(ValueError, match="lengths must hold"):
        BatchSampler([], 2, shuffle=True)
    with pytest.raises(ValueError, match=f"longest example, of {max(LENGTHS)} tokens, got 50"):
        BatchSampler(LENGTHS, batch_tokens=50, shuffle=True)
    for stop, share, got in (
        (900, 1.0, "900 examples and a sum of 1"),
        (1004, 1.0, "1004 examples and a sum of 1"),
        (1003, 0.99, "1003 examples and a sum of 0.99"),
        (1003, 1.01, "1003 examples and a sum of 1.01"),
    ):
        with pytest.raises(ValueError, match=f"groups must cover all 1003 examples .*got {got}:"):
            BatchSampler(LENGTHS, 8, shuffle=True, groups=[Group(0, stop, share)])
