"""95 % intervals of shares, correlations and means."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastenc._base.extras import require

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
DRAWS = 1000  # resamples of a bootstrap
BLOCK = 50  # resamples that are computed together, so that the memory is bounded
Interval = tuple[float, float]


def exact_interval(right: int, asked: int) -> Interval:
    """The exact binomial interval of the share ``right / asked``.

    Source: Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404.
    """
    stats = require("scipy.stats", extra="train")
    interval = stats.binomtest(right, asked).proportion_ci(LEVEL, method="exact")
    return float(interval.low), float(interval.high)


def mean_interval(values: Sequence[float]) -> Interval:
    """The percentile bootstrap interval of a mean. With one value it is this value."""
    numpy = require("numpy", extra="train")
    values = numpy.asarray(values, dtype="float64")
    means = [counts @ values / len(values) for counts in _resamples(len(values))]
    return _percentiles(numpy.concatenate(means))


def spearman_interval(x: Sequence[float], y: Sequence[float]) -> Interval:
    """The percentile bootstrap interval of Spearman's correlation; NaN if ``x`` or ``y`` is constant.

    A resample is a number of copies of each pair. The ranks in it are computed from sums of these numbers, so nothing
    is sorted again. Resamples in which one side is constant have no correlation and are left out.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    numpy = require("numpy", extra="train")
    sides = [
        numpy.unique(numpy.asarray(side, dtype="float64"), return_inverse=True) for side in (x, y)
    ]
    correlations = []
    for counts in _resamples(len(x)):
        one, other = (_centred_ranks(counts, inverse, len(names)) for names, inverse in sides)
        products = [(counts * a * b).sum(1) for a, b in ((one, other), (one, one), (other, other))]
        with numpy.errstate(invalid="ignore", divide="ignore"):
            correlations.append(products[0] / numpy.sqrt(products[1] * products[2]))
    return _percentiles(numpy.concatenate(correlations))


def _resamples(number: int) -> "Iterator[np.ndarray]":
    """Blocks of resamples, the same in every call: how often each item is drawn, float64 (BLOCK, number)."""
    numpy = require("numpy", extra="train")
    rng = numpy.random.default_rng(0)
    for _ in range(DRAWS // BLOCK):
        chosen = rng.integers(number, size=(BLOCK, number))
        yield numpy.stack([numpy.bincount(row, minlength=number) for row in chosen]).astype(float)


def _centred_ranks(counts: "np.ndarray", inverse: "np.ndarray", different: int) -> "np.ndarray":
    """Each item's mean rank in each resample, minus the mean of all ranks: (resamples, items).

    Args:
        inverse: index of each item's value among the sorted different values.
        different: number of different values.
    """
    numpy = require("numpy", extra="train")
    of_value = numpy.stack([numpy.bincount(inverse, row, different) for row in counts])
    # Equal values share the middle of the ranks that they take.
    ranks = of_value.cumsum(1) - of_value / 2
    return ranks[:, inverse] - counts.sum(1, keepdims=True) / 2


def _percentiles(values: "np.ndarray") -> Interval:
    numpy = require("numpy", extra="train")
    values = values[numpy.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    tail = 100 * (1 - LEVEL) / 2
    low, high = numpy.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
