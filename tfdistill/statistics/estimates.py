"""Means, standard errors and bootstrap intervals, over trials and over rows.

An estimate is a figure over several trials, for churn over their pairs: its
`mean`, `standard_error`, `interval` and `values`. One trial has neither of the
two in the middle. Imports neither TensorFlow nor Keras.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill import metrics

CONFIDENCE = 0.95
NUM_RESAMPLES = 5_000
# Resamples of many rows, and of all figures at once, take longer.
_NUM_RESAMPLES_OF_ROWS = 2_000
# More rows are first summed in as many blocks, in random order: the sums'
# resamples vary as the rows' do.
_MOST_BLOCKS = 5_000
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
    statistic: Callable[..., Any], *samples: object
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

    By expanded percentiles; see `percentiles`.

    Args:
        statistic: Takes drawn samples, and an `axis` if it is vectorized. NaN
            for trials that have no pair; infinite if there is no such figure.
        *samples: For each method, one value for each of its trials.
        vectorized: Whether the statistic takes many draws at once.

    Returns:
        None for a single trial, or if a draw has no such figure.
    """
    sizes = [len(sample) for sample in samples]
    if min(sizes) < 2:
        return None

    def of_drawn(*places: np.ndarray) -> Any:
        values = [s[p] for s, p in zip(samples, places, strict=True)]
        if vectorized:
            return statistic(*values, axis=-1)
        return [statistic(*each) for each in zip(*values, strict=True)]

    rng = np.random.default_rng(min(sizes))
    places = [rng.integers(0, n, (NUM_RESAMPLES, n)) for n in sizes]
    with np.errstate(invalid="ignore"):
        drawn = np.asarray(of_drawn(*places))
    # One trial drawn again and again has no pair; such draws are rare.
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn) or not np.isfinite(drawn).all():
        return None
    low, high = percentiles(drawn, CONFIDENCE, num_trials=min(sizes))
    return float(low), float(high)


def percentiles(
    drawn: np.ndarray, confidence: float, *, num_trials: int | None = None
) -> np.ndarray:
    """Returns both ends of an interval, `[2, ...]`.

    For few trials, the percentiles are the expanded ones of Hesterberg 2015
    (What Teachers Should Know About the Bootstrap): plain ones are too narrow
    for small samples; these are as far out as a t interval is for normal data.

    Args:
        drawn: The figure of each resample, `[resamples, ...]`.
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


# ---- over rows ----

# A figure, and what each row adds to its error, `[rows]`: to first order, the
# figure of a resample exceeds it by the mean of the drawn rows' parts.
Parts = tuple[float, np.ndarray]


def mean_parts(
    values: np.ndarray, rows: np.ndarray | slice = np.s_[:]
) -> Parts:
    """Returns the mean of some rows, and what each of all rows adds."""
    centre, parts = values[rows].mean(), np.zeros(len(values))
    parts[rows] = (values[rows] - centre) * len(values) / len(values[rows])
    return float(centre), parts


def offset_parts(labels: np.ndarray, predictions: np.ndarray) -> Parts:
    """Returns `metrics.calibration_offset`, and what each row adds."""
    offset, _ = metrics.calibration_offset(labels, predictions)
    p = np.clip(predictions, 1e-7, 1 - 1e-7)
    p = 1 / (1 + (1 - p) / p * math.exp(-offset))
    return offset, (labels - p) / np.mean(p * (1 - p))


def auc_parts(labels: np.ndarray, predictions: np.ndarray) -> Parts:
    """Returns the AUC, and what each row adds (DeLong et al. 1988)."""
    is_one = labels == 1
    won = metrics.placements(labels, predictions)
    auc = float(won[is_one].mean())
    sizes = np.where(is_one, is_one.sum(), (~is_one).sum())
    return auc, (won - auc) * len(labels) / sizes


def over_rows(
    values: np.ndarray,
    parts: np.ndarray,
    *,
    confidence: float = CONFIDENCE,
    together: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns figures' means over retrains, and their intervals.

    By a paired bootstrap: rows are drawn, the same in all retrains and for all
    figures, and then retrains are drawn. Each row is drawn a Poisson number of
    times (Chamandy et al. 2012, "Estimating Uncertainty for Massive Data
    Streams").

    Args:
        values: Figures of each retrain, `[retrains, figures]`.
        parts: What each row adds to their errors, `[retrains, figures, rows]`.
        confidence: Confidence of each interval, two-sided.
        together: Bool `[figures]`: those whose intervals hold all at once. They
            are as wide as the worst of them needs, by the same draws (max-t:
            Romano and Wolf 2005, "Exact and Approximate Stepdown Methods").

    Returns:
        `[figures]` and `[figures, 2]`.
    """
    retrains, _, size = parts.shape
    blocks = min(size, _MOST_BLOCKS)
    starts = np.linspace(0, size, blocks, endpoint=False).astype(np.int64)
    rng = np.random.default_rng(0)
    shuffled = parts[..., rng.permutation(size)]
    sums = np.add.reduceat(shuffled, starts, axis=2) / size

    def of_resample() -> np.ndarray:
        of_each = sums @ rng.poisson(1, blocks) + values
        return of_each[rng.integers(0, retrains, retrains)].mean(axis=0)

    drawn = np.array([of_resample() for _ in range(_NUM_RESAMPLES_OF_ROWS)])
    means, errors = values.mean(axis=0), drawn.std(axis=0)
    low, high = percentiles(drawn, confidence)
    if together is not None and together.any():
        scaled = np.abs(drawn - means) / np.maximum(errors, 1e-12)
        most = np.quantile(scaled[:, together].max(axis=1), confidence)
        low = np.where(together, means - most * errors, low)
        high = np.where(together, means + most * errors, high)
    return means, np.c_[low, high]


def pooled(estimates: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the mean of values, weighted by their errors, and its error."""
    values, errors = np.array(estimates).T
    weights = 1 / np.maximum(errors, 1e-12) ** 2
    mean = float((weights * values).sum() / weights.sum())
    return mean, float(weights.sum() ** -0.5)
