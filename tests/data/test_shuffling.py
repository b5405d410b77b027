import pytest
import torch

from fastenc.data.shuffling import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_every_place_once(size):
    order = Permutation(size, 3, "epoch", 1)
    indices = torch.arange(size)
    places = order(indices)
    assert places.sort().values.equal(indices)
    assert order(indices.flip(0)).equal(places.flip(0)), "an entry depends on its place alone"
    assert order(indices[:, None]).equal(places[:, None]) and order(indices[-1]).equal(places[-1])


def test_orders_of_other_seeds_are_others():
    indices = torch.arange(1000)
    seeds = ((1,), (2,), (1, 2), (12,))
    assert len({tuple(Permutation(1000, *seed)(indices).tolist()) for seed in seeds}) == 4


def test_entries_are_spread_as_random_ones_are():
    """Over 400 seeds, the counts of 12 entries at 12 places have a chi-squared with 121 degrees of freedom: mean 121,
    standard deviation 15.6. And the differences of neighbours in a large order are not small."""
    counts = torch.zeros(12, 12)
    for seed in range(400):
        counts[torch.arange(12), Permutation(12, seed)(torch.arange(12))] += 1
    expected = 400 / 12
    assert float(((counts - expected) ** 2 / expected).sum()) < 121 + 5 * 15.6
    order = Permutation(100_000, 1)(torch.arange(100_000)).double()
    assert order.diff().abs().mean() == pytest.approx(100_000 / 3, rel=0.02)
    correlation = torch.corrcoef(torch.stack((order, torch.arange(100_000).double())))[0, 1]
    assert abs(correlation) < 5 / 100_000**0.5


def test_large_sizes_need_no_memory():
    size = 2**59 + 11
    places = Permutation(size, 5)(torch.tensor([0, 1, size // 2, size - 1]))
    assert len(set(places.tolist())) == 4 and (places >= 0).all() and (places < size).all()


def test_bad_input_is_named():
    for size in (0, 2**60):
        with pytest.raises(ValueError, match=r"size must be at least 1 and below 2\^60, got"):
            Permutation(size, 1)
