import random
from collections import Counter

import pytest

from fastenc.data import BatchSampler, Group

LENGTHS = [random.Random(0).randint(3, 100) for _ in range(1003)]


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
def test_shards_are_disjoint_and_equally_long_when_shuffled(shuffle):
    shards = [BatchSampler(LENGTHS, 8, shuffle=shuffle, num_shards=4, shard=i) for i in range(4)]
    seen = [index for shard in shards for batch in shard.epoch(0) for index in batch]
    assert len(seen) == len(set(seen))
    assert len(set(seen)) >= 1003 - 3 * 8
    assert all(len(list(shard.epoch(0))) == shard.count(0) for shard in shards)
    assert all(list(s.epoch(0, start=17)) == list(s.epoch(0))[17:] for s in shards)
    if shuffle:
        assert len({shard.count(0) for shard in shards}) == 1
    else:
        assert sorted(seen) == list(range(1003))


def test_more_processes_than_batches_still_get_one_each():
    shards = [BatchSampler([3, 4, 5], 2, shuffle=True, num_shards=4, shard=i) for i in range(4)]
    assert [len(list(shard.epoch(0))) for shard in shards] == [1, 1, 1, 1]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchSampler(LENGTHS, 0, shuffle=True)
    with pytest.raises(ValueError, match="there are no examples"):
        BatchSampler([], 2, shuffle=True)
    with pytest.raises(ValueError, match=r"shard must be in \[0, 2\), got 2"):
        BatchSampler(LENGTHS, 2, shuffle=True, num_shards=2, shard=2)


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


def test_processes_share_batches_by_tokens():
    shards = [
        BatchSampler(LENGTHS, batch_tokens=500, shuffle=True, num_shards=3, shard=i)
        for i in range(3)
    ]
    seen = [index for shard in shards for batch in shard.epoch(1) for index in batch]
    assert len(seen) == len(set(seen)) and len({shard.count(1) for shard in shards}) == 1


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


def test_bad_settings_are_named():
    for sizes in ({}, {"batch_size": 2, "batch_tokens": 200}):
        with pytest.raises(ValueError, match="batch_size or batch_tokens, one of them"):
            BatchSampler(LENGTHS, **sizes, shuffle=True)
    with pytest.raises(ValueError, match=f"longest example, of {max(LENGTHS)} tokens, got 50"):
        BatchSampler(LENGTHS, batch_tokens=50, shuffle=True)
    with pytest.raises(ValueError, match="groups must be all 1003 examples"):
        BatchSampler(LENGTHS, 8, shuffle=True, groups=[Group(0, 900, 1.0)])
