"""What a span's rows look like, in a few numbers, and whether they look right.

A model that starts from a good one stays good for a while on broken data, so
broken data does not show in its predictions; it shows here.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.held_out import predictions

# Ids by a hash; numbers by rounding on a scale that is linear around 0 and
# logarithmic beyond; and those that are missing.
_ID_BUCKETS = 64
_STEPS_PER_UNIT, _MOST_STEPS = 4, 40
_MISSING = -1000
# Of more columns, such as an image's, only one common summary is kept.
_MOST_COLUMNS = 64
# Rows of which a column's worth is measured, and that a bucket needs.
_WORTH_ROWS, _SHUFFLES = 20_000, 4
_FEW_ROWS = 10
# In standard deviations; what is smaller is no matter, however sure.
_LEAST_EFFECT = 0.1
# Fewer weights than this may come near to anything. A table's distance from the
# version before its parent, as a share of that from its parent, was 0.97 at
# least in 190 honest retrains; its change was twice the most so far at most.
_MANY_WEIGHTS, _LEAST_RATIO, _MOST_CHANGE = 10_000, 0.95, 5.0
Summary = Mapping[str, Any]


def data_summary(
    inputs: Any,
    labels: Any,
    *,
    predict: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Returns what the gate compares of a span's rows, for the lineage.

    A retrain calls it for the rows that it trains on and for those that it
    holds out, and keeps both: `lineage["data"] = {"training": ...,
    "held_out": ...}`.

    Args:
        inputs: An array `[rows, ...]`, or a dict, tuple or list of such.
            Integers, bools and strings are ids; floats are numbers.
        labels: `[rows, ...]`.
        predict: Of the promoted version, from `inputs` to the probability of
            "yes" `[rows]` or `[rows, 1]`, or of each class `[rows, classes]`.
            With it, each column's `worth` is measured: how much the log loss
            rises when the column is shuffled (Breiman 2001, "Random Forests").

    Returns:
        For JSON: `rows`, `labels`, `columns` by name, and with `predict` the
        `calibration` of the promoted version in logits, with its error. A
        column has `mean`, `std`, and how many rows and which sum of labels
        fall into each of its `buckets`.

    Example:
        >>> found = data_summary(np.array([[0.0], [1.0]]), np.array([0, 1]))
        >>> found["rows"], found["columns"]["inputs[0]"]["mean"]
        (2, 0.5)
    """
    truth = np.asarray(labels)
    truth = truth.reshape(len(truth), -1)[:, 0]
    is_binary = bool(np.isin(truth, (0, 1)).all())
    arrays = dict(_leaves(inputs))
    columns = [
        (name, key, place)
        for key, array in arrays.items()
        for name, place in _places(key, array)
    ]
    found: dict[str, Any] = {
        "rows": len(truth),
        "labels": _column(truth, None),
        "columns": {
            name: _column(arrays[key][place], truth if is_binary else None)
            for name, key, place in columns
        },
    }
    if predict is not None:
        rows = np.random.default_rng(0).permutation(len(truth))[:_WORTH_ROWS]
        arrays = {key: array[rows] for key, array in arrays.items()}
        truth = truth[rows]

        def predicted() -> np.ndarray:
            given = predict(_rebuilt(inputs, iter(arrays.values())))
            given = np.asarray(given, np.float64)
            return given[:, 0] if given.shape[1:] == (1,) else given

        plain = predicted()
        is_yes = is_binary and plain.shape == truth.shape
        if is_yes:
            found["calibration"] = list(predictions.calibration(truth, plain))
        of_classes = plain.ndim == 2 and len(plain) == len(truth)
        if (is_yes or of_classes) and len(columns) <= _MOST_COLUMNS:
            for name, key, place in columns:
                kept = arrays[key]
                change = -_losses(truth, plain)
                for shift in range(1, _SHUFFLES + 1):
                    arrays[key] = kept.copy()
                    arrays[key][place] = np.roll(kept[place], shift, axis=0)
                    change += _losses(truth, predicted()) / _SHUFFLES
                arrays[key] = kept
                error = change.std() / math.sqrt(len(truth))
                worth = [float(change.mean()), float(error)]
                found["columns"][name]["worth"] = worth
    return found


def _leaves(inputs: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(inputs, Mapping | tuple | list):
        pairs = inputs.items() if isinstance(inputs, Mapping) else None
        for key, value in pairs or enumerate(inputs):
            yield from _leaves(value, f"{name}.{key}".removeprefix("."))
    else:
        yield name or "inputs", np.asarray(inputs)


def _rebuilt(inputs: Any, leaves: Iterator[np.ndarray]) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _rebuilt(value, leaves) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)([_rebuilt(value, leaves) for value in inputs])
    return next(leaves)


def _places(key: str, array: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Yields the name of each column, and the index of its rows."""
    shape = array.shape[1:]
    if not shape or math.prod(shape) > _MOST_COLUMNS:
        yield key, np.s_[:]
        return
    for place in np.ndindex(shape):
        yield f"{key}[{','.join(map(str, place))}]", (np.s_[:], *place)


def _column(values: np.ndarray, labels: np.ndarray | None) -> dict[str, Any]:
    flat = values.reshape(-1)
    if flat.size > len(values):
        labels = None
    known = np.zeros(0)
    if flat.dtype.kind in "iubf":
        known = flat[np.isfinite(flat)].astype(np.float64)
    buckets = _buckets(flat)
    sums = np.zeros(len(flat)) if labels is None else labels
    keys, inverse = np.unique(buckets, return_inverse=True)
    rows = np.bincount(inverse)
    positives = np.bincount(inverse, weights=sums)
    return {
        "is_float": flat.dtype.kind == "f",
        "mean": float(known.mean()) if len(known) else None,
        "std": float(known.std()) if len(known) else None,
        "buckets": {
            str(key): [int(count), float(total)]
            for key, count, total in zip(keys, rows, positives, strict=True)
        },
    }


def _buckets(values: np.ndarray) -> np.ndarray:
    """Returns an int64 for each value, the same on every machine."""
    if values.dtype.kind == "f":
        scaled = np.arcsinh(np.nan_to_num(values.astype(np.float64)))
        steps = np.rint(_STEPS_PER_UNIT * scaled).astype(np.int64)
        steps = np.clip(steps, -_MOST_STEPS, _MOST_STEPS)
        return np.where(np.isfinite(values), steps, _MISSING)
    unique, inverse = np.unique(values, return_inverse=True)
    if values.dtype.kind in "iub":
        mixed = unique.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashed = (mixed >> np.uint64(40)) % np.uint64(_ID_BUCKETS)
    else:
        hashed = np.array(
            [zlib.crc32(str(one).encode()) % _ID_BUCKETS for one in unique]
        )
    return hashed.astype(np.int64)[inverse.reshape(-1)]


def _losses(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    if probabilities.ndim == 2:
        labels = labels.astype(np.int64)
        right = np.take_along_axis(probabilities, labels[:, np.newaxis], 1)[
            :, 0
        ]
    else:
        right = np.where(labels == 1, probabilities, 1 - probabilities)
    return -np.log(np.clip(right, 1e-7, 1))


def weight_summary(
    weights: Mapping[str, np.ndarray],
    *,
    parent: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Returns how far a candidate's weights are from those they began with.

    For the lineage of a warm start, as `lineage["weights"]`: a table that was
    taken from elsewhere is as good as any in the first days, and shows here.

    Args:
        weights: The candidate's, by name.
        parent: The promoted version's.
        before: Those of the version promoted before that.

    Returns:
        By name, of weights with many entries: the Euclidean distance to
        `parent`, and to `before`, as a share of the length of `parent`.
    """
    found = {}
    for name, value in weights.items():
        if name not in parent or parent[name].shape != np.shape(value):
            continue
        if np.size(value) >= _MANY_WEIGHTS:
            length = max(float(np.linalg.norm(parent[name])), 1e-12)
            old = (before or {}).get(name)
            found[name] = {
                "parent": float(np.linalg.norm(value - parent[name])) / length
            }
            if old is not None and old.shape == np.shape(value):
                distance = float(np.linalg.norm(value - old))
                found[name]["before"] = distance / length
    return found


def compare(
    lineage: Summary, earlier: Sequence[Summary] = (), *, gate: Any
) -> list[str]:
    """Returns what is wrong with a candidate's rows and weights.

    Args:
        lineage: The candidate's: its `data` of the new rows of its last span
            are compared with those held out of the same span, which are alike
            but for chance if they were drawn at random, and with earlier
            spans; its `weights` with its parent's.
        earlier: Those of the versions promoted before, the oldest first.
        gate: The `Gate`.

    Returns:
        A sentence for each finding.
    """
    found = []
    past = [one["data"]["training"] for one in earlier if "data" in one]
    if "data" in lineage:
        data = lineage["data"]
        rows, usual = data["training"]["rows"], [one["rows"] for one in past]
        if usual and rows < gate.least_rows * np.median(usual):
            found.append(
                f"The span has {rows:,.0f} rows to train on, and the earlier "
                f"ones had {np.median(usual):,.0f}; the limit is "
                f"{gate.least_rows:.0%} of that."
            )
        found += _rows(data["training"], data.get("held_out"), past, gate)
    for name, own in lineage.get("weights", {}).items():
        moved = [
            one["weights"][name]["parent"]
            for one in earlier
            if name in one.get("weights", {})
        ]
        if own.get("before", math.inf) < _LEAST_RATIO * own["parent"]:
            found.append(
                f"The weights {name} are nearer to those of the version before "
                f"({own['before']:.4f} of their length) than to those that "
                f"training began with ({own['parent']:.4f})."
            )
        elif moved and own["parent"] > _MOST_CHANGE * max(moved):
            found.append(
                f"The weights {name} have changed by {own['parent']:.4f} of "
                f"their length; the most so far is {max(moved):.4f}."
            )
    return found


def _rows(
    training: Summary,
    held_out: Summary | None,
    earlier: Sequence[Summary],
    gate: Any,
) -> list[str]:
    found = []
    now = _named(training, gate.ignored_columns)
    beside = _named(held_out or {}, gate.ignored_columns)
    before = [_named(one, gate.ignored_columns) for one in earlier]
    level = gate.false_alarms / len(now)
    rates_moved = functools.partial(_rates_moved, level=level)
    for name, column in now.items():
        past = [one[name] for one in before if name in one]
        pairs = list(itertools.pairwise([*past, column]))
        for what, moved, limit in (
            ("values", _moved, gate.drift),
            ("label rates of the values", rates_moved, gate.label_drift),
        ):
            *moves, last = [0.0, *(moved(*pair) for pair in pairs)]
            if last > max(limit, 1.5 * max(moves, default=0)):
                found.append(
                    f"The {what} of {name} have changed by {last:.3f} since "
                    f"the span before (mean {_mean(past[-1])} to "
                    f"{_mean(column)}); the most so far is {max(moves):.3f}."
                )
                break
        else:
            found += _unlike(name, column, beside.get(name), past, level)
    return found


def _unlike(
    name: str,
    column: Summary,
    other: Summary | None,
    past: Sequence[Summary],
    level: float,
) -> list[str]:
    """How a column differs from the held-out rows', or is of no worth.

    The three differences share a twelfth of the level: they need no more.
    """
    from scipy import stats

    differs = [
        what
        for what, compared in (
            ("other values", _shares),
            ("other labels with its values", _rates),
            ("another mean", _means),
        )
        if other and _differ(*compared(column, other), level / 36)
    ]
    if other and differs:
        return [
            f"{name} has {' and '.join(differs)} in the rows trained on than "
            f"in those held out (mean {_mean(column)} and {_mean(other)})."
        ]
    worths = [one["worth"] for one in (*past, other or {}) if "worth" in one]
    if worths and "worth" in column:
        (usual, error), (worth, own) = pooled(worths), column["worth"]
        sigmas = float(stats.norm.isf(11 / 12 * level))
        if usual - worth > max(usual / 2, sigmas * math.hypot(error, own)):
            return [
                f"{name} is worth {worth:.4f} nats to the promoted version in "
                f"the rows trained on, and {usual:.4f} elsewhere: its values "
                "are not those of their rows."
            ]
    return []


def _differ(score: float, freedom: int, size: float, level: float) -> bool:
    from scipy import stats

    is_sure = stats.chi2.sf(score, freedom) < level
    return is_sure and score - freedom > _LEAST_EFFECT**2 * size


def _named(summary: Summary, ignored: Sequence[str]) -> dict[str, Any]:
    if not summary:
        return {}
    columns = {"labels": summary["labels"], **summary["columns"]}
    return {k: v for k, v in columns.items() if k not in ignored}


def _mean(column: Summary) -> str:
    return "none" if column["mean"] is None else f"{column['mean']:.4g}"


def _aligned(one: Summary, other: Summary) -> np.ndarray:
    """Rows and sums of labels of both, int64 `[2, buckets, 2]`."""
    keys = sorted({*one["buckets"], *other["buckets"]})
    return np.array(
        [[x["buckets"].get(key, (0, 0)) for key in keys] for x in (one, other)],
        np.float64,
    )


def _moved(one: Summary, other: Summary) -> float:
    """Total variation distance of the shares of buckets."""
    rows = _aligned(one, other)[..., 0]
    shares = rows / rows.sum(axis=1, keepdims=True)
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _rates_moved(one: Summary, other: Summary, *, level: float) -> float:
    """The same of label rates: how many of their deviations they are off.

    0 unless they surely are: few rows in many buckets differ by chance.
    """
    from scipy import stats

    score, freedom, size = _rates(one, other)
    if stats.chi2.sf(score, freedom) >= level:
        return 0.0
    return math.sqrt(max(score - freedom, 0) / size)


def _size(first: Any, second: Any) -> Any:
    """Rows of each side that would tell as much."""
    return first * second / np.maximum(first + second, 1)


def _shares(one: Summary, other: Summary) -> tuple[float, int, float]:
    """Chi-square of two samples, its degrees of freedom, and their size."""
    rows = _aligned(one, other)[..., 0]
    few = rows.sum(axis=0) < _FEW_ROWS
    rows = np.c_[rows[:, ~few], rows[:, few].sum(axis=1)]
    total, sizes = rows.sum(axis=0), rows.sum(axis=1, keepdims=True)
    expected = sizes * total / sizes.sum()
    score = ((rows - expected) ** 2 / np.maximum(expected, 1)).sum()
    freedom = max(int((total > 0).sum()) - 1, 1)
    return float(score), freedom, float(_size(*sizes[:, 0]))


def _rates(one: Summary, other: Summary) -> tuple[float, int, float]:
    """The same for the label rates of the buckets, but for a common shift."""
    (rows, others), (sums, other_sums) = _aligned(one, other).transpose(2, 0, 1)
    rate = (sums + other_sums) / (rows + others)
    kept = np.minimum(rows, others) >= _FEW_ROWS
    kept &= (rate > 0) & (rate < 1)
    if kept.sum() < 2:
        return 0.0, 1, 1.0
    size = _size(rows, others)[kept]
    gap = (sums[kept] / rows[kept]) - (other_sums[kept] / others[kept])
    weights = size / (rate * (1 - rate))[kept]
    score = weights * (gap - np.average(gap, weights=weights)) ** 2
    return float(score.sum()), int(kept.sum()) - 1, float(size.sum())


def _means(one: Summary, other: Summary) -> tuple[float, int, float]:
    """The same for the means."""
    if not one["is_float"] or one["std"] is None or other["std"] is None:
        return 0.0, 1, 1.0
    rows = [
        sum(count for count, _ in x["buckets"].values()) for x in (one, other)
    ]
    variance = max(one["std"], other["std"]) ** 2
    size = float(_size(*rows))
    gap = one["mean"] - other["mean"]
    return size * gap**2 / variance if variance else 0.0, 1, size


def pooled(estimates: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the mean of values, weighted by their errors, and its error."""
    values, errors = np.array(estimates).T
    weights = 1 / np.maximum(errors, 1e-12) ** 2
    mean = float((weights * values).sum() / weights.sum())
    return mean, float(weights.sum() ** -0.5)
