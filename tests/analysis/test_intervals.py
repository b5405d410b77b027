"""Intervals compared with scipy's, and with resamples written out."""

import numpy as np
import pytest
from scipy import stats

from fastenc.analysis import intervals
from fastenc.analysis.intervals import exact_interval, mean_interval, spearman_interval


def test_an_exact_interval_has_the_tails_of_the_binomial():
    low, high = exact_interval(7, 20)
    assert stats.binom.sf(6, 20, low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 20, high) == pytest.approx(0.025)
    assert exact_interval(0, 5)[0] == 0 and exact_interval(5, 5)[1] == 1


def test_a_resamples_correlation_is_scipys(monkeypatch):
    """With ties on both sides."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 6, 30).astype(float), rng.integers(0, 9, 30).astype(float)
    drawn = []
    resamples = intervals._resamples

    def keep(number):
        for counts in resamples(number):
            drawn.extend(np.repeat(np.arange(number), row.astype(int)) for row in counts)
            yield counts

    monkeypatch.setattr(intervals, "_resamples", keep)
    interval = spearman_interval(x, y)
    assert len(drawn) == intervals.DRAWS and all(len(rows) == 30 for rows in drawn)
    each = [stats.spearmanr(x[rows], y[rows]).statistic for rows in drawn]
    assert interval == pytest.approx(np.percentile(each, [2.5, 97.5]))


def test_a_bootstraps_interval_of_a_mean_is_about_that_of_the_normal():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = (end - values.mean() for end in mean_interval(values))
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((-half, half), rel=0.08)
    assert mean_interval([2.5]) == (2.5, 2.5)


def test_what_is_constant_has_no_correlation():
    assert np.isnan(spearman_interval([1, 1, 1], [1, 2, 3])).all()
