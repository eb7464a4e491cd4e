"""Means, standard errors and bootstrap intervals over few trials.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 5_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure over several trials; for churn, over their pairs.

    One trial has no `standard_error` and no bootstrap `interval` (95%).
    """

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    values: tuple[float, ...]

    def to_tree(self) -> dict[str, Any]:
        """Returns what JSON has of it."""
        return dataclasses.asdict(self)


def over_trials(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value for each trial."""
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return Estimate(
            mean=float(found.mean()),
            standard_error=None,
            interval=None,
            values=tuple(found.tolist()),
        )
    drawn = found[_resamples(len(found))].mean(axis=1)
    return Estimate(
        mean=float(found.mean()),
        standard_error=float(found.std(ddof=1) / np.sqrt(len(found))),
        interval=_interval(drawn, len(found)),
        values=tuple(found.tolist()),
    )


def over_pairs(matrix: np.ndarray) -> Estimate:
    """Returns the mean of one value for each pair of trials.

    The pairs of one trial are not independent, so trials are drawn, and of
    their pairs those of a trial with itself are left out. The standard error
    is that of the jackknife over trials (Efron and Stein 1981).

    The diagonal of the symmetric matrix is not looked at.
    """
    size = len(matrix)
    upper = _above_diagonal(matrix)
    error, interval = None, None
    if size > 2:
        left_out = [
            _above_diagonal(
                np.delete(np.delete(matrix, index, 0), index, 1)
            ).mean()
            for index in range(size)
        ]
        error = float(np.sqrt((size - 1) * np.var(left_out)))
        interval = _interval(_pair_means(matrix), size)
    return Estimate(
        mean=float(upper.mean()),
        standard_error=error,
        interval=interval,
        values=tuple(upper.tolist()),
    )


def jackknifed(figure: float, left_out: Sequence[float]) -> Estimate:
    """Returns a figure of all trials together, with its error.

    Its error is the jackknife's; its interval draws trials, to first order, by
    what each adds to the figure.

    `left_out` has the figure without the first trial, the second, and so on.
    Fewer than three have no error.
    """
    others, size = np.asarray(left_out, np.float64), len(left_out)
    if size < 3:
        return Estimate(
            mean=figure, standard_error=None, interval=None, values=()
        )
    parts = figure + (size - 1) * (others.mean() - others)
    return dataclasses.replace(
        over_trials(parts.tolist()), values=tuple(others.tolist())
    )


def ratio(
    numerator: Sequence[float], denominator: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the ratio of two methods' means, and its interval."""
    return _of_means(numerator, denominator, np.divide)


def difference(
    values: Sequence[float], others: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the difference of two methods' means, and its interval."""
    return _of_means(values, others, np.subtract)


def ratio_of_pairs(
    matrix: np.ndarray, other: np.ndarray, *, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, tuple[float, float] | None]:
    """Returns the ratio of two methods' means over pairs, and its interval."""
    both = (matrix, other)
    means = tuple(float(_above_diagonal(one).mean()) for one in both)
    size = min(map(len, both))
    value, interval = _compared(
        _pair_means(matrix, 1, num_resamples),
        _pair_means(other, 2, num_resamples),
        means,
        np.divide,
        size,
    )
    # Two trials are one pair: all resamples of it are equal.
    return value, interval if size > 2 else None


def of_resamples(
    combine: Callable[[np.ndarray, np.ndarray], float], size: int, other: int
) -> tuple[float, float] | None:
    """Returns the interval of any figure of two methods' trials.

    `combine` takes indices of trials of both, drawn with replacement, and
    returns NaN if those have no such figure. None for single trials, or if
    draws have no such figure.
    """
    if min(size, other) < 2:
        return None
    pairs = zip(_resamples(size, 1), _resamples(other, 2), strict=True)
    drawn = np.array([combine(ours, theirs) for ours, theirs in pairs])
    if not np.isfinite(drawn).all():
        return None
    return _interval(drawn, min(size, other))


def _of_means(
    values: Sequence[float],
    others: Sequence[float],
    combine: Callable[..., Any],
) -> tuple[float, tuple[float, float] | None]:
    return _compared(
        _bootstrap_means(values, 1),
        _bootstrap_means(others, 2),
        (float(np.mean(values)), float(np.mean(others))),
        combine,
        min(len(values), len(others)),
    )


def _compared(
    drawn: np.ndarray,
    others: np.ndarray,
    means: tuple[float, ...],
    combine: Callable[..., Any],
    size: int,
) -> tuple[float, tuple[float, float] | None]:
    length = min(len(drawn), len(others))
    with np.errstate(divide="ignore", invalid="ignore"):
        both = np.asarray(combine(drawn[:length], others[:length]))
        value = float(combine(np.float64(means[0]), np.float64(means[1])))
    if size < 2 or not np.isfinite(both).all():
        return value, None
    return value, _interval(both, size)


def _bootstrap_means(values: Sequence[float], stream: int) -> np.ndarray:
    found = np.asarray(values, np.float64)
    return found[_resamples(len(found), stream)].mean(axis=1)


def _above_diagonal(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(len(matrix), 1)]


def _pair_means(
    matrix: np.ndarray, stream: int = 0, num_resamples: int = NUM_RESAMPLES
) -> np.ndarray:
    """Mean over the pairs of each resample, as far as it has any."""
    size = len(matrix)
    rows = _resamples(size, stream, num_resamples)
    # How often each trial was drawn: [resamples, trials].
    counts = (rows[:, :, np.newaxis] == np.arange(size)).sum(axis=1)
    apart = np.where(np.eye(size, dtype=bool), 0.0, matrix)
    totals = (counts @ apart * counts).sum(axis=1)
    num_pairs = size**2 - (counts**2).sum(axis=1)
    # One trial drawn again and again has no pair; such draws are rare.
    return totals[num_pairs > 0] / num_pairs[num_pairs > 0]


def _resamples(
    size: int, stream: int = 0, num_resamples: int = NUM_RESAMPLES
) -> np.ndarray:
    """Indices of trials, drawn with replacement: `[resamples, size]`."""
    rng = np.random.default_rng([size, stream])
    return rng.integers(0, size, [num_resamples, size])


def _interval(drawn: np.ndarray, size: int) -> tuple[float, float]:
    """Percentiles, widened for few trials.

    Plain percentiles are too narrow for small samples. These are the expanded
    ones of Hesterberg 2015 (What Teachers Should Know About the Bootstrap):
    as far out as a t interval is for normal data.
    """
    # Only here: it takes a second.
    from scipy import stats

    quantile = stats.t.ppf(0.5 + CONFIDENCE / 2, size - 1)
    tail = stats.norm.cdf(-np.sqrt(size / (size - 1)) * quantile)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)
