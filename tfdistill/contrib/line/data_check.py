"""The look at the data: are the rows that a candidate learned from right?

A model that starts from a good one stays good for a while on broken data, so
broken data does not show in its predictions; it shows here. `summary` is what a
lineage keeps of a span's rows. `check` compares summaries: from the rows held
out of the same span, those trained on differ by chance only; from the span
before, not far more than ever.
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
_ID_BUCKETS, _STEPS_PER_UNIT, _MOST_STEPS, _MISSING = 64, 4, 40, -1000
# An array with more columns, such as an image, is one column.
_MOST_COLUMNS = 64
# Rows of which a column's worth is measured, and that a bucket needs.
_WORTH_ROWS, _SHUFFLES, _FEW_ROWS = 20_000, 4, 10
# In standard deviations; smaller gaps don't matter, however sure.
_LEAST_GAP = 0.1
Summary = Mapping[str, Any]


def summary(
    inputs: Any, labels: Any, *, predict: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Returns what the gate compares of a span's rows, as JSON has it.

    `predict` is the promoted version, from `inputs` to the probability of "yes"
    `[rows]` or of each class `[rows, classes]`. With it, each column's `worth`
    is measured: how much the log loss rises when the column is shuffled
    (Breiman 2001, "Random Forests"), and its error; and what all logits lack,
    as `calibration`. Integers, bools and strings are ids, floats are numbers. A
    bucket has a number of rows and a sum of labels.

    Example:
        >>> found = summary(np.array([[0.0], [1.0]]), np.array([0, 1]))
        >>> found["rows"], found["columns"]["inputs[0]"]["buckets"]
        (2, {'0': [1, 0.0], '4': [1, 1.0]})
    """
    import keras  # Only here: the gate needs none.

    truth = np.asarray(labels).reshape(len(labels), -1)[:, 0]
    is_binary = bool(np.isin(truth, (0, 1)).all())
    arrays: list[np.ndarray] = []
    columns: dict[str, tuple[int, Any]] = {}
    for path, leaf in keras.tree.flatten_with_path(inputs):
        name = ".".join(map(str, path)) or "inputs"
        shape = np.shape(leaf)[1:]
        for place in np.ndindex(
            shape if math.prod(shape) <= _MOST_COLUMNS else ()
        ):
            suffix = f"[{','.join(map(str, place))}]" if place else ""
            columns[name + suffix] = len(arrays), (np.s_[:], *place)
        arrays.append(np.asarray(leaf))
    found: dict[str, Any] = {
        "rows": len(truth),
        "labels": _column(truth, None),
        "columns": {
            name: _column(arrays[at][place], truth if is_binary else None)
            for name, (at, place) in columns.items()
        },
    }
    if predict is None:
        return found
    rows = np.random.default_rng(0).permutation(len(truth))[:_WORTH_ROWS]
    truth, arrays = truth[rows], [array[rows] for array in arrays]

    def predicted() -> np.ndarray:
        return np.asarray(predict(keras.tree.pack_sequence_as(inputs, arrays)))

    plain = predicted()
    is_yes = plain.size == len(truth)
    if len(plain) != len(truth) or (is_yes and not is_binary):
        return found
    losses = metrics.log_losses(truth, plain)
    gains = None
    if is_yes:
        offset = metrics.calibration_offset(truth, plain.reshape(-1))
        found["calibration"] = list(offset)
        gains = losses - metrics.log_losses(1 - truth, plain)
    for name, (at, place) in columns.items():
        if len(columns) > _MOST_COLUMNS:
            break
        own, kept, change = found["columns"][name], arrays[at], -losses
        for shift in range(1, _SHUFFLES + 1):
            arrays[at] = kept.copy()
            arrays[at][place] = np.roll(kept[place], shift, axis=0)
            change = change + metrics.log_losses(truth, predicted()) / _SHUFFLES
        arrays[at] = kept
        error = change.std() / math.sqrt(len(truth))
        own["worth"] = [float(change.mean()), float(error)]
        if gains is not None and kept[place].ndim == 1 and not own["is_float"]:
            own["swapped"] = _swapped(kept[place], gains)
    return found


def _swapped(ids: np.ndarray, gains: np.ndarray) -> list[Any]:
    """Returns the id whose labels look most as if 0 and 1 were swapped.

    With its rows, and the logarithm of how much likelier these labels would be
    if they were, by the promoted version, divided by the number of ids. Of
    right labels it exceeds t with a probability of exp(-t) at most: a
    likelihood ratio has the mean 1 (Ville 1939), whatever the rows.
    """
    unique, places = np.unique(ids, return_inverse=True)
    sums = np.bincount(places, gains)
    at = int(sums.argmax())
    score = float(sums[at]) - math.log(len(sums))
    return [str(unique[at]), int((places == at).sum()), score]


def _column(values: np.ndarray, labels: np.ndarray | None) -> dict[str, Any]:
    flat = values.reshape(-1)
    keys, places = np.unique(_buckets(flat), return_inverse=True)
    if labels is None or len(labels) != len(flat):
        labels = np.zeros(len(flat))
    counts, sums = np.bincount(places), np.bincount(places, labels)
    return {
        "is_float": flat.dtype.kind == "f",
        "buckets": {
            str(key): [int(rows), float(total)]
            for key, rows, total in zip(keys, counts, sums, strict=True)
        },
    }


def _buckets(values: np.ndarray) -> np.ndarray:
    """Returns an int64 for each value, the same on every machine."""
    if values.dtype.kind == "f":
        scaled = np.arcsinh(np.nan_to_num(values.astype(np.float64)))
        steps = np.rint(_STEPS_PER_UNIT * scaled).astype(np.int64)
        steps = np.clip(steps, -_MOST_STEPS, _MOST_STEPS)
        return np.where(np.isfinite(values), steps, _MISSING)
    unique, places = np.unique(values, return_inverse=True)
    if values.dtype.kind in "iub":
        mixed = unique.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashed = (mixed >> np.uint64(40)) % np.uint64(_ID_BUCKETS)
    else:
        texts = (str(one).encode() for one in unique)
        hashed = np.array([zlib.crc32(text) % _ID_BUCKETS for text in texts])
    return hashed.astype(np.int64)[places.reshape(-1)]


def check(context: Any) -> str | None:
    """Returns what is wrong with the rows trained on; see `gate.Context`.

    A sentence for each column at most, and one for the number of rows.
    """
    gate, data = context.gate, context.lineage.get("data")
    if data is None:
        return None
    past = [one["data"]["training"] for one in context.earlier if "data" in one]
    now, beside, *before = (
        _named(one, gate.ignored_columns)
        for one in (data["training"], data.get("held_out"), *past)
    )
    found = []
    rows, usual = data["training"]["rows"], [one["rows"] for one in past]
    if usual and rows < gate.least_rows * np.median(usual):
        found.append(
            f"The span has {rows:,.0f} training rows, and earlier spans had "
            f"{np.median(usual):,.0f}; the limit is {gate.least_rows:.0%} of "
            "that."
        )
    level = gate.false_alarms / max(len(now), 1)
    for name, column in now.items():
        known = [one[name] for one in before if name in one]
        faults = _faults(name, column, beside.get(name), known, gate, level)
        found += itertools.islice(faults, 1)
    return " ".join(found) or None


def _named(one: Summary | None, ignored: Sequence[str]) -> dict[str, Any]:
    columns = {"labels": one["labels"], **one["columns"]} if one else {}
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

    The probability that good rows are found to differ from those held out is
    `level` at most: gaps and swapped labels share a sixth of it, as they need
    no more.
    """
    for what, setting, gap, limit in (
        # If this share of the rows moves, the gap is twice that or more.
        ("The values of", "drift", _values, 2 * gate.drift),
        (
            "The shares of positive labels by",
            *("label_drift", _rates, gate.label_drift),
        ),
    ):
        moves = [
            gap(one, other, level)
            for one, other in itertools.pairwise([*past, column])
        ]
        bound = max(limit, 1.5 * max([0, *moves[:-1]]))
        if past and moves[-1] > bound:
            yield (
                f"{what} {name} changed by {moves[-1]:.3f} standard deviations "
                f"since the last span; the limit is {bound:.3f}. If the new "
                f"data are right, raise the gate's `{setting}`, or add "
                f"{name!r} to its `ignored_columns`."
            )
        if beside and gap(column, beside, level / 36) > _LEAST_GAP:
            yield f"{what} {name}: training rows differ from held-out rows."
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


def _values(one: Summary, other: Summary, level: float) -> float:
    """The gap of the shares of buckets; see `_sure`."""
    from scipy import stats

    rows, _ = _aligned(one, other)
    few = rows.sum(axis=0) < _FEW_ROWS
    rows = np.c_[rows[:, ~few], rows[:, few].sum(axis=1)]
    found = stats.chi2_contingency(rows[:, rows.any(axis=0)], correction=False)
    size = _size(*rows.sum(axis=1))
    return _sure(found.statistic, max(found.dof, 1), size, level)


def _rates(one: Summary, other: Summary, level: float) -> float:
    """The gap of the buckets' label rates, apart from a shift of all."""
    rows, sums = _aligned(one, other)
    rate = sums.sum(axis=0) / rows.sum(axis=0)
    kept = (rows.min(axis=0) >= _FEW_ROWS) & (rate > 0) & (rate < 1)
    if kept.sum() < 2:
        return 0.0
    rows, sums, rate = rows[:, kept], sums[:, kept], rate[kept]
    size, gap = _size(*rows), np.subtract(*(sums / rows))
    weights = size / (rate * (1 - rate))
    score = weights * (gap - np.average(gap, weights=weights)) ** 2
    return _sure(score.sum(), len(rate) - 1, size.sum(), level)


def _sure(score: float, freedom: int, size: float, level: float) -> float:
    """Returns a gap in standard deviations; 0 if it may be chance.

    From a chi-square, and the rows per side that would show as much.
    """
    from scipy import stats

    is_sure = stats.chi2.sf(score, freedom) < level
    return math.sqrt(max(score - freedom, 0) / size) * is_sure


def _aligned(one: Summary, other: Summary) -> np.ndarray:
    """Rows, and sums of labels, of both by bucket: `[2, 2, buckets]`."""
    keys = sorted({*one["buckets"], *other["buckets"]})
    found = [[x["buckets"].get(k, (0, 0)) for k in keys] for x in (one, other)]
    return np.array(found, np.float64).transpose(2, 0, 1)


def _size(first: np.ndarray | float, second: np.ndarray | float) -> Any:
    return first * second / np.maximum(first + second, 1)
