"""What a span's rows look like, in a few numbers, and whether they look right.

A model that starts from a good one stays good for a while on broken data, so
broken data does not show in its predictions; it shows here. A column is a few
counts, and two columns have a distance: since the span before, it must not be
far more than it ever was; to the rows held out of the same span, next to none.
"""

import itertools
import math
import statistics
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill import metrics
from tfdistill.statistics import estimates

# Ids by a hash; numbers by rounding on a scale that is linear around 0 and
# logarithmic beyond; and those that are missing.
_ID_BUCKETS = 64
_STEPS_PER_UNIT, _MOST_STEPS = 4, 40
_MISSING = -1000
# More columns than this, such as an image's, share one common summary.
_MOST_COLUMNS = 64
# Rows of which a column's worth is measured, and that a bucket needs.
_WORTH_ROWS, _SHUFFLES = 20_000, 4
_FEW_ROWS = 10
# In standard deviations; smaller effects don't matter, however sure.
_LEAST_EFFECT = 0.1
# Fewer weights than this may come near to anything. A table's distance from its
# parent's predecessor, divided by its distance from its parent, was 0.97 at
# least in 190 honest retrains; its change was twice the most so far at most.
_MANY_WEIGHTS, _LEAST_RATIO, _MOST_CHANGE = 10_000, 0.95, 5.0
Summary = Mapping[str, Any]


# ---- what a lineage keeps ----


def data_summary(
    inputs: Any,
    labels: Any,
    *,
    predict: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Returns what the gate compares of a span's rows, for the lineage.

    `predict` is the promoted version, from `inputs` to the probability of "yes"
    `[rows]` or `[rows, 1]`, or of each class `[rows, classes]`. With it, each
    column's `worth` is measured: how much the log loss rises when the column is
    shuffled (Breiman 2001, "Random Forests"), and its error; and what all
    logits lack, as `calibration`. Integers, bools and strings are ids, floats
    are numbers. A bucket has a number of rows and a sum of labels. Of ids with
    labels 0 and 1 there is `swapped`: see `_swapped`.

    Example:
        >>> found = data_summary(np.array([[0.0], [1.0]]), np.array([0, 1]))
        >>> found["rows"], found["columns"]["inputs[0]"]["mean"]
        (2, 0.5)
    """
    import keras  # Only here: the gate needs none.

    truth = np.asarray(labels)
    truth = truth.reshape(len(truth), -1)[:, 0]
    is_binary = bool(np.isin(truth, (0, 1)).all())
    arrays: list[np.ndarray] = []
    columns: dict[str, tuple[int, Any]] = {}
    for path, leaf in keras.tree.flatten_with_path(inputs):
        name = ".".join(map(str, path)) or "inputs"
        array = np.asarray(leaf)
        for suffix, place in _places(array.shape[1:]):
            columns[name + suffix] = len(arrays), place
        arrays.append(array)
    sums = truth if is_binary else None
    found: dict[str, Any] = {
        "rows": len(truth),
        "labels": _column(truth, None),
        "columns": {
            name: _column(arrays[at][place], sums)
            for name, (at, place) in columns.items()
        },
    }
    if predict is None:
        return found
    rows = np.random.default_rng(0).permutation(len(truth))[:_WORTH_ROWS]
    truth, arrays = truth[rows], [array[rows] for array in arrays]

    def predicted() -> np.ndarray:
        given = predict(keras.tree.pack_sequence_as(inputs, arrays))
        given = np.asarray(given, np.float64)
        return given[:, 0] if given.shape[1:] == (1,) else given

    plain = predicted()
    of_classes = plain.ndim == 2 and len(plain) == len(truth)
    gains = None
    if is_binary and plain.shape == truth.shape:
        found["calibration"] = list(metrics.calibration_offset(truth, plain))
        gains = metrics.log_losses(truth, plain)
        gains -= metrics.log_losses(1 - truth, plain)
    elif not of_classes:
        return found
    for name, (at, place) in columns.items():
        if len(columns) > _MOST_COLUMNS:
            break
        kept, change = arrays[at], -metrics.log_losses(truth, plain)
        for shift in range(1, _SHUFFLES + 1):
            arrays[at] = kept.copy()
            arrays[at][place] = np.roll(kept[place], shift, axis=0)
            change += metrics.log_losses(truth, predicted()) / _SHUFFLES
        arrays[at] = kept
        error = change.std() / math.sqrt(len(truth))
        worth = [float(change.mean()), float(error)]
        found["columns"][name]["worth"] = worth
        ids = kept[place]
        if gains is not None and ids.ndim == 1 and ids.dtype.kind != "f":
            found["columns"][name]["swapped"] = _swapped(ids, gains)
    return found


def _swapped(ids: np.ndarray, gains: np.ndarray) -> list[Any]:
    """Returns the id whose labels look most as if 0 and 1 were swapped.

    With its rows, and the logarithm of how much likelier these labels would be
    if they were, by the promoted version, times the number of ids. Of right
    labels it exceeds t with a probability of exp(-t) at most: a likelihood
    ratio has the mean 1 (Ville 1939), whatever the rows.
    """
    unique, inverse, rows = np.unique(
        ids, return_inverse=True, return_counts=True
    )
    sums = np.bincount(inverse, gains)
    at = int(sums.argmax())
    score = float(sums[at]) - math.log(len(sums))
    return [str(unique[at]), int(rows[at]), score]


def _places(shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields what follows a column's name, and the index of its rows."""
    if not shape or math.prod(shape) > _MOST_COLUMNS:
        yield "", np.s_[:]
        return
    for place in np.ndindex(shape):
        yield f"[{','.join(map(str, place))}]", (np.s_[:], *place)


def _column(values: np.ndarray, labels: np.ndarray | None) -> dict[str, Any]:
    flat = values.reshape(-1)
    known = np.zeros(0)
    if flat.dtype.kind in "iubf":
        known = flat[np.isfinite(flat)].astype(np.float64)
    has_sums = labels is not None and len(labels) == len(flat)
    keys, inverse = np.unique(_buckets(flat), return_inverse=True)
    rows = np.bincount(inverse)
    sums = np.bincount(inverse, labels) if has_sums else 0.0 * rows
    return {
        "is_float": flat.dtype.kind == "f",
        "mean": float(known.mean()) if len(known) else None,
        "std": float(known.std()) if len(known) else None,
        "buckets": {
            str(key): [int(count), float(total)]
            for key, count, total in zip(keys, rows, sums, strict=True)
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


def weight_summary(
    weights: Mapping[str, np.ndarray],
    *,
    parent: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Returns how far a candidate's weights are from the weights it began with.

    By name, for weights with many entries: the Euclidean distances to the
    promoted version's weights and to its predecessor's, as a share of the norm
    of the promoted version's. A table that was taken from elsewhere predicts as
    well as any in the first days, but shows here.
    """
    others = {"parent": parent, "before": before or {}}
    return {
        name: {
            other: float(np.linalg.norm(value - found[name]))
            / max(float(np.linalg.norm(parent[name])), 1e-12)
            for other, found in others.items()
            if np.shape(found.get(name, ())) == np.shape(value)
        }
        for name, value in weights.items()
        if np.size(value) >= _MANY_WEIGHTS
        and np.shape(parent.get(name, ())) == np.shape(value)
    }


# ---- what the gate compares ----


def compare(
    lineage: Summary, earlier: Sequence[Summary] = (), *, gate: Any
) -> list[str]:
    """Returns what is wrong with a candidate's rows and weights.

    Its `lineage` has `data`, which summarizes the new rows of its last span,
    `training` and `held_out`, which differ only by chance if they were drawn at
    random; and the `weights` of a warm start. `earlier` are the lineages of the
    versions promoted before, the oldest first. Each column gets one sentence at
    most.
    """
    found = []
    past = [one["data"]["training"] for one in earlier if "data" in one]
    if "data" in lineage:
        training = lineage["data"]["training"]
        rows, usual = training["rows"], [one["rows"] for one in past]
        if usual and rows < gate.least_rows * np.median(usual):
            found.append(
                f"The span has {rows:,.0f} training rows, and earlier spans "
                f"had {np.median(usual):,.0f}; the limit is "
                f"{gate.least_rows:.0%} of that."
            )
        now, beside, *before = (
            _named(one, gate.ignored_columns)
            for one in (training, lineage["data"].get("held_out"), *past)
        )
        level = gate.false_alarms / max(len(now), 1)
        for name, column in now.items():
            known = [one[name] for one in before if name in one]
            faults = _faults(name, column, beside.get(name), known, gate, level)
            found += itertools.islice(faults, 1)
    for name, own in lineage.get("weights", {}).items():
        moved = [
            one["weights"][name]["parent"]
            for one in earlier
            if name in one.get("weights", {})
        ]
        if own.get("before", math.inf) < _LEAST_RATIO * own["parent"]:
            found.append(
                f"The weights {name} are closer to the previous version's "
                f"({own['before']:.4f} of their length) than to the weights "
                f"that training began with ({own['parent']:.4f})."
            )
        elif moved and own["parent"] > _MOST_CHANGE * max(moved):
            found.append(
                f"The weights {name} have changed by {own['parent']:.4f} of "
                f"their length; the largest change so far is {max(moved):.4f}."
            )
    return found


def _named(summary: Summary | None, ignored: Sequence[str]) -> dict[str, Any]:
    if summary is None:
        return {}
    columns = {"labels": summary["labels"], **summary["columns"]}
    return {k: v for k, v in columns.items() if k not in ignored}


def _faults(
    name: str,
    column: Summary,
    beside: Summary | None,
    past: Sequence[Summary],
    gate: Any,
    level: float,
) -> Iterator[str]:
    """Yields what is wrong with a column of the rows trained on.

    It is compared with `beside`, the rows held out of the same span, and with
    `past`, the rows of earlier spans in turn. The probability that good rows
    are found wrong is `level` at most: three gaps and swapped labels share
    twelfths of it, as they need no more.
    """
    # Ids, also hashed ones, have no mean that says anything.
    has_mean = column["is_float"] or name == "labels"
    for what, gap, setting, limit in (
        # If this share of the rows moves, the gap is twice that or more.
        ("The values of", _values, "drift", 2 * gate.drift),
        (
            "The shares of positive labels by",
            _rates,
            "label_drift",
            gate.label_drift,
        ),
        ("The mean of", _means, "", math.inf),  # A date's moves every day.
    ):
        moves = [
            _effect(*gap(*pair), level=level)
            for pair in itertools.pairwise([*past, column])
        ]
        most = max(moves[:-1], default=0.0)
        bound = max(limit, 1.5 * most)
        if past and moves[-1] > bound:
            means = f" (mean {_mean(past[-1])} to {_mean(column)})" * has_mean
            yield (
                f"{what} {name} changed by {moves[-1]:.3f} standard deviations "
                f"since the last span{means}; the limit is {bound:.3f}. If the "
                f"new data are right, raise the gate's `{setting}`, or add "
                f"{name!r} to its `ignored_columns`."
            )
        if beside is None:
            continue
        if _effect(*gap(column, beside), level=level / 36) > _LEAST_EFFECT:
            means = f" (means {_mean(column)} and {_mean(beside)})" * has_mean
            yield (
                f"{what} {name}: the training rows differ from the held-out "
                f"rows{means}."
            )
    for where, one in (("trained on", column), ("held out", beside or {})):
        value, rows, score = one.get("swapped", ("", 0, 0.0))
        if score > -math.log(level / 12):
            yield (
                f"The labels look swapped where {name} is {value}, in {rows:,} "
                f"rows {where}: to the promoted version, they would be "
                f"exp({score:.0f}) times as likely with 0 and 1 exchanged."
            )
    # It moves with the model and the days.
    recent = (*past[-2:], beside or {})
    worths = [one["worth"] for one in recent if "worth" in one]
    if worths and "worth" in column:
        (usual, error), (worth, own) = estimates.pooled(worths), column["worth"]
        sigmas = -statistics.NormalDist().inv_cdf(9 / 12 * level)
        if usual - worth > max(usual / 2, sigmas * math.hypot(error, own)):
            yield (
                f"{name} is worth {worth:.4f} nats to the promoted version in "
                f"the training rows, and {usual:.4f} elsewhere: its values "
                "probably belong to other rows."
            )


def _mean(column: Summary) -> str:
    return "none" if column["mean"] is None else f"{column['mean']:.4g}"


# ---- how far two columns are apart ----


def _effect(score: float, freedom: int, size: float, *, level: float) -> float:
    """Returns a gap in standard deviations; 0 if it may be chance.

    From a chi-square `score`, and the rows per side that would show as much.
    """
    from scipy import stats

    is_sure = stats.chi2.sf(score, freedom) < level
    return math.sqrt(max(score - freedom, 0) / size) * is_sure


def _values(one: Summary, other: Summary) -> tuple[float, int, float]:
    """The gap of the shares of buckets."""
    rows, _ = _aligned(one, other)
    few = rows.sum(axis=0) < _FEW_ROWS
    rows = np.c_[rows[:, ~few], rows[:, few].sum(axis=1)]
    total, sizes = rows.sum(axis=0), rows.sum(axis=1, keepdims=True)
    expected = sizes * total / sizes.sum()
    score = ((rows - expected) ** 2 / np.maximum(expected, 1)).sum()
    return score, max(int((total > 0).sum()) - 1, 1), _size(*sizes[:, 0])


def _rates(one: Summary, other: Summary) -> tuple[float, int, float]:
    """The gap of the buckets' label rates, apart from a shift of all."""
    rows, sums = _aligned(one, other)
    rate = sums.sum(axis=0) / rows.sum(axis=0)
    kept = (rows.min(axis=0) >= _FEW_ROWS) & (rate > 0) & (rate < 1)
    if kept.sum() < 2:
        return 0.0, 1, 1.0
    rows, sums, rate = rows[:, kept], sums[:, kept], rate[kept]
    size, gap = _size(*rows), np.subtract(*(sums / rows))
    weights = size / (rate * (1 - rate))
    score = weights * (gap - np.average(gap, weights=weights)) ** 2
    return score.sum(), len(rate) - 1, size.sum()


def _means(one: Summary, other: Summary) -> tuple[float, int, float]:
    """The gap of the means of numbers."""
    deviation = max(one["std"] or 0.0, other["std"] or 0.0)
    is_known = None not in (one["mean"], other["mean"])
    if not (one["is_float"] and is_known and deviation):
        return 0.0, 1, 1.0
    rows, _ = _aligned(one, other)
    size = _size(*rows.sum(axis=1))
    gap = (one["mean"] - other["mean"]) / deviation
    return size * gap**2, 1, size


def _aligned(one: Summary, other: Summary) -> np.ndarray:
    """Rows, and sums of labels, of both by bucket: `[2, 2, buckets]`."""
    keys = sorted({*one["buckets"], *other["buckets"]})
    found = [[x["buckets"].get(k, (0, 0)) for k in keys] for x in (one, other)]
    return np.array(found, np.float64).transpose(2, 0, 1)


def _size(first: Any, second: Any) -> Any:
    return first * second / np.maximum(first + second, 1)
