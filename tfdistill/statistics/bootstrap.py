"""Resamples of trials, of rows, or of both.

An axis draws: from a generator and a number of resamples, it returns what was
drawn in each of them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Axis = Callable[[np.random.Generator, int], np.ndarray]


def trials(size: int) -> Axis:
    """Draws as many trials as there are: their indices `[resamples, size]`."""
    return lambda rng, number: rng.integers(0, size, (number, size))


def rows(size: int) -> Axis:
    """Draws each row a Poisson number of times: counts `[resamples, size]`.

    For many rows (Chamandy et al. 2012, "Estimating Uncertainty for Massive
    Data Streams").
    """
    return lambda rng, number: rng.poisson(1, (number, size))


def resampled(
    statistic: Callable[..., Any],
    *axes: Axis,
    rng: np.random.Generator,
    num_resamples: int,
    at_once: int | None = None,
) -> np.ndarray:
    """Returns a statistic of many resamples, `[num_resamples, ...]`.

    Args:
        statistic: Takes what each axis has drawn, `[at_once, size]`; returns
            `[at_once, ...]`.
        *axes: What is drawn, independently of each other.
        rng: What all draws are from.
        num_resamples: A multiple of `at_once`.
        at_once: How many resamples share a call, and the memory. Default: all.

    Example:
        >>> values = np.array([1.0, 2.0, 3.0])
        >>> drawn = resampled(
        ...     lambda chosen: values[chosen].mean(axis=-1),
        ...     trials(3),
        ...     rng=np.random.default_rng(0),
        ...     num_resamples=1000,
        ... )
        >>> drawn.shape, bool(abs(drawn.mean() - 2) < 0.1)
        ((1000,), True)
    """
    at_once = at_once or num_resamples
    return np.concatenate(
        [
            statistic(*[axis(rng, at_once) for axis in axes])
            for _ in range(num_resamples // at_once)
        ]
    )


def percentiles(
    drawn: np.ndarray, confidence: float, *, num_trials: int | None = None
) -> np.ndarray:
    """Returns both ends of an interval, `[2, ...]`.

    For few trials, the percentiles are the expanded ones of Hesterberg 2015
    (What Teachers Should Know About the Bootstrap): plain ones are too narrow
    for small samples; these are as far out as a t interval is for normal data.

    Args:
        drawn: What `resampled` returns.
        confidence: The interval's, two-sided.
        num_trials: How few there are. Default: enough for plain percentiles.
    """
    tail = (1 - confidence) / 2
    if num_trials is not None:
        # Only here: it takes a second.
        from scipy import stats

        quantile = stats.t.ppf(0.5 + confidence / 2, num_trials - 1)
        widening = np.sqrt(num_trials / (num_trials - 1))
        tail = stats.norm.cdf(-widening * quantile)
    return np.quantile(drawn, [tail, 1 - tail], axis=0)
