"""Means, standard errors and bootstrap intervals over few trials.

An estimate is a figure over several trials, for churn over their pairs: its
`mean`, `standard_error`, `interval` and `values`. One trial has neither of the
two in the middle. Imports neither TensorFlow nor Keras.
"""

import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 5_000
Interval = tuple[float, float]
Estimate = dict[str, Any]


def over_trials(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value for each trial."""
    found = np.asarray(values, np.float64)
    error = None
    if len(found) > 1:
        error = float(found.std(ddof=1) / np.sqrt(len(found)))
    return {
        "mean": float(found.mean()),
        "standard_error": error,
        "interval": interval(np.mean, found),
        "values": tuple(found.tolist()),
    }


def over_pairs(matrix: np.ndarray) -> Estimate:
    """Returns the mean of one value for each pair of trials.

    The pairs of one trial are not independent, so trials are drawn, and pairs
    of a trial with itself are left out. The standard error is estimated by the
    jackknife over trials (Efron and Stein 1981).

    The diagonal of the symmetric matrix is not looked at.
    """
    size = len(matrix)
    upper = matrix[np.triu_indices(size, 1)]
    error, found = None, None
    if size > 2:
        left_out = [
            mean_of_pairs(matrix, np.delete(np.arange(size), index))
            for index in range(size)
        ]
        error = float(np.sqrt((size - 1) * np.var(left_out)))
        found = interval(
            lambda rows, axis: mean_of_pairs(matrix, rows), np.arange(size)
        )
    return {
        "mean": float(upper.mean()),
        "standard_error": error,
        "interval": found,
        "values": tuple(upper.tolist()),
    }


def jackknifed(figure: float, left_out: Sequence[float]) -> Estimate:
    """Returns a figure of all trials together, with its error.

    Its error is the jackknife's; its interval draws trials, to first order, by
    what each adds to the figure.

    `left_out` has the figure without the first trial, the second, and so on.
    Fewer than three have no error.
    """
    others, size = np.asarray(left_out, np.float64), len(left_out)
    none = {"mean": figure, "standard_error": None, "interval": None}
    if size < 3:
        return {**none, "values": ()}
    parts = figure + (size - 1) * (others.mean() - others)
    return {**over_trials(parts.tolist()), "values": tuple(others.tolist())}


def difference(
    values: Sequence[float], others: Sequence[float]
) -> tuple[float, Interval | None]:
    """Returns the difference of two methods' means, and its interval."""
    return _compared(
        lambda ours, theirs, axis: ours.mean(axis) - theirs.mean(axis),
        values,
        others,
    )


def ratio(
    values: Sequence[float], others: Sequence[float]
) -> tuple[float, Interval | None]:
    """Returns the ratio of two methods' means, and its interval."""
    return _compared(
        lambda ours, theirs, axis: ours.mean(axis) / theirs.mean(axis),
        values,
        others,
    )


def ratio_of_pairs(
    matrix: np.ndarray, other: np.ndarray
) -> tuple[float, Interval | None]:
    """Returns the ratio of two methods' means over pairs, and its interval."""
    sizes = len(matrix), len(other)
    value, found = _compared(
        lambda ours, theirs, axis: (
            mean_of_pairs(matrix, ours) / mean_of_pairs(other, theirs)
        ),
        *map(np.arange, sizes),
    )
    # Two trials are one pair: all resamples of it are equal.
    return value, found if min(sizes) > 2 else None


def _compared(
    statistic: Callable[..., Any], *samples: Any
) -> tuple[float, Interval | None]:
    arrays = [np.asarray(sample) for sample in samples]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*arrays, axis=-1))
        return value, interval(statistic, *arrays)


def mean_of_pairs(matrix: np.ndarray, rows: np.ndarray) -> Any:
    """Mean over the pairs of drawn trials `[..., trials]`; NaN without one."""
    rows = rows.astype(np.int64)
    one, other = rows[..., :, np.newaxis], rows[..., np.newaxis, :]
    is_pair = one != other
    number = is_pair.sum((-1, -2))
    total = np.where(is_pair, matrix[one, other], 0.0).sum((-1, -2))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def interval(
    statistic: Callable[..., Any], *samples: np.ndarray, vectorized: bool = True
) -> Interval | None:
    """Returns the interval of a figure of one method's trials, or two's.

    The percentiles are the expanded ones of Hesterberg 2015 (What Teachers
    Should Know About the Bootstrap): plain ones are too narrow for small
    samples; these are as far out as a t interval is for normal data.

    Args:
        statistic: Takes drawn samples, and an `axis` if it is vectorized. NaN
            for trials that have no pair; infinite if there is no such figure.
        *samples: For each method, one value for each of its trials.
        vectorized: Whether the statistic takes many draws at once.

    Returns:
        None for a single trial, or if a draw has no such figure.
    """
    size = min(map(len, samples))
    if size < 2:
        return None
    # Only here: it takes a second.
    from scipy import stats

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # From draws without the figure, which are looked at below.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        drawn = stats.bootstrap(
            samples,
            statistic,
            n_resamples=NUM_RESAMPLES,
            method="percentile",
            vectorized=vectorized,
            random_state=np.random.default_rng(size),
        ).bootstrap_distribution
    # One trial drawn again and again has no pair; such draws are rare.
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn) or not np.isfinite(drawn).all():
        return None
    quantile = stats.t.ppf(0.5 + CONFIDENCE / 2, size - 1)
    tail = stats.norm.cdf(-np.sqrt(size / (size - 1)) * quantile)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)
