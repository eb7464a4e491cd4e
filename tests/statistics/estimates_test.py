"""Estimates and their intervals: over trials, pairs of trials, and rows."""

import numpy as np
import pytest
from scipy import stats

from tfdistill.comparison import trials
from tfdistill.statistics import estimates


def test_an_estimate_over_trials():
    found = estimates.over_trials([1.0, 2.0, 3.0, 6.0])
    assert found["mean"] == 3.0
    assert found["standard_error"] == pytest.approx(stats.sem([1, 2, 3, 6]))
    low, high = found["interval"]
    assert 1.0 <= low < 3.0 < high <= 6.0
    single = estimates.over_trials([2.0])
    assert (single["standard_error"], single["interval"]) == (None, None)


@pytest.mark.deep
@pytest.mark.parametrize("size", [6])
def test_intervals_cover_the_truth_as_often_as_they_say(size):
    rng = np.random.default_rng(size)
    covered = 0
    for _ in range(400):
        low, high = estimates.over_trials(rng.normal(size=size))["interval"]
        covered += low <= 0 <= high
    # Plain percentiles cover .88 of them at six trials.
    assert 0.93 <= covered / 400 <= 0.99


def test_churn_is_estimated_over_trials_not_pairs():
    rng = np.random.default_rng(0)
    places = rng.normal(size=6)
    matrix = np.abs(places[:, None] - places)
    found = estimates.over_pairs(matrix)
    assert found["mean"] == pytest.approx(matrix[np.triu_indices(6, 1)].mean())
    assert len(found["values"]) == 15
    naive = stats.sem(found["values"])
    assert found["standard_error"] > naive
    assert found["interval"][0] < found["mean"] < found["interval"][1]
    two = estimates.over_pairs(matrix[:2, :2])
    assert (two["standard_error"], two["interval"]) == (None, None)


@pytest.mark.deep
@pytest.mark.parametrize("num_trials", [4, 6])
def test_a_churn_ratio_of_a_method_to_itself_is_seldom_clear(num_trials):
    rng = np.random.default_rng(num_trials)

    def matrix():
        scales = np.exp(0.15 * rng.normal(size=[num_trials, 1]))
        found = rng.normal(size=[num_trials, 100]) * scales
        return np.abs(found[:, None] - found).mean(-1)

    clear = 0
    for _ in range(200):
        _, (low, high) = estimates.ratio_of_pairs(matrix(), matrix())
        clear += not low <= 1 <= high
    # .32 of them at three trials, which is why those get no verdict.
    assert clear / 200 <= 0.1
    assert trials.LEAST_TRIALS >= 4


def test_draws_of_trials_are_those_of_scipy():
    values, size = np.array([1.0, 2.0, 4.0, 8.0]), 4
    theirs = stats.bootstrap(
        [values],
        np.mean,
        n_resamples=estimates.NUM_RESAMPLES,
        random_state=np.random.default_rng(size),
    ).bootstrap_distribution
    expected = estimates.percentiles(theirs, 0.95, num_trials=size)
    assert estimates.interval(np.mean, values) == tuple(expected)


def test_an_interval_over_rows_and_retrains_includes_what_both_add():
    rng = np.random.default_rng(0)
    row = rng.normal(size=2000)
    rows = np.tile(row - row.mean(), [3, 1, 1])
    for values in (np.zeros([3, 1]), np.array([[-0.2], [0.0], [0.2]])):
        means, ((low, high),) = estimates.over_rows(values, rows)
        expected = np.sqrt(1 / 2000 + values.var() / 3)
        assert means[0] == pytest.approx(0)
        assert (high - low) / 2 == pytest.approx(1.96 * expected, rel=0.25)
