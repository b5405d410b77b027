import random

import pytest

from fastenc.data import BatchSampler

DRAW = random.Random(0)
LENGTHS = [DRAW.randint(3, 100) for _ in range(1003)]


def test_every_example_once_an_epoch_in_a_random_order():
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    batches = list(sampler.epoch(0))
    assert len(batches) == len(sampler) == 126
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(1003)) != order


def test_order_depends_on_seed_and_epoch_alone_and_starts_anywhere():
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    again = BatchSampler(LENGTHS, 8, shuffle=True, seed=1)
    assert list(again.epoch(3)) == list(sampler.epoch(3)) != list(sampler.epoch(4))
    assert list(BatchSampler(LENGTHS, 8, shuffle=True, seed=2).epoch(3)) != list(sampler.epoch(3))
    assert list(sampler.epoch(3, start=70)) == list(sampler.epoch(3))[70:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_are_disjoint_and_equally_long_when_shuffled(shuffle):
    shards = [BatchSampler(LENGTHS, 8, shuffle=shuffle, num_shards=4, shard=i) for i in range(4)]
    seen = [index for shard in shards for batch in shard.epoch(0) for index in batch]
    assert len(seen) == len(set(seen))
    assert len(set(seen)) >= 1003 - 3 * 8
    assert all(len(list(shard.epoch(0))) == len(shard) for shard in shards)
    if shuffle:
        assert len({len(shard) for shard in shards}) == 1
    else:
        assert sorted(seen) == list(range(1003))


def test_more_processes_than_batches_still_get_one_each():
    shards = [BatchSampler([3, 4, 5], 2, shuffle=True, num_shards=4, shard=i) for i in range(4)]
    assert [len(list(shard.epoch(0))) for shard in shards] == [1, 1, 1, 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_keep_a_limit_of_tokens(shuffle):
    sampler = BatchSampler(LENGTHS, 8, shuffle=shuffle, seed=1, max_tokens=90)
    first, second = list(sampler.epoch(0)), list(sampler.epoch(1))
    assert len(first) == len(second) == len(sampler)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    assert (first != second) == shuffle
    assert sorted(index for batch in first for index in batch) == list(range(1003))
    tokens = [sum(LENGTHS[i] for i in batch) for batch in first]
    assert all(n <= 90 or len(batch) == 1 for n, batch in zip(tokens, first, strict=True))
    assert max(tokens) > 90 and 1 < max(map(len, first)) <= 8, "longer examples are alone"
    assert list(sampler.epoch(1, start=9)) == second[9:]


def test_a_limit_that_no_batch_reaches_changes_only_who_is_together():
    sampler = BatchSampler(LENGTHS, 8, shuffle=True, seed=1, max_tokens=8 * 100)
    assert len(sampler) == 126 and len(list(sampler.epoch(0))) == 126


def test_shards_of_limited_batches_are_disjoint_and_equally_long():
    settings = dict(shuffle=True, max_tokens=200, num_shards=3)
    shards = [BatchSampler(LENGTHS, 8, shard=i, **settings) for i in range(3)]
    seen = [index for shard in shards for batch in shard.epoch(2) for index in batch]
    assert len(seen) == len(set(seen)) >= 1003 - 2 * 8
    assert len({len(list(shard.epoch(2))) for shard in shards}) == 1


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        BatchSampler(LENGTHS, 8, shuffle=True, max_tokens=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchSampler(LENGTHS, 0, shuffle=True)
    with pytest.raises(ValueError, match="there are no examples"):
        BatchSampler([], 2, shuffle=True)
    with pytest.raises(ValueError, match=r"shard must be in \[0, 2\), got 2"):
        BatchSampler(LENGTHS, 2, shuffle=True, num_shards=2, shard=2)
