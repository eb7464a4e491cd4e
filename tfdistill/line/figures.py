"""How good models are on held-out rows, what has changed, and how surely.

Reads nothing, and imports neither TensorFlow nor Keras.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.held_out import predictions
from tfdistill.line import data_summary

# Before the name of a slice whose log loss is estimated.
SLICE = "slice "
_NUM_RESAMPLES = 2_000
# More rows are first summed in as many blocks, in random order: the sums'
# resamples vary as the rows' do.
_MOST_BLOCKS = 5_000
_CALIBRATION_BINS = 15


class Model:
    """What each held-out row adds to a model's figures.

    Attributes:
        means: By name, what is a mean over rows; with a model before, also
            what has changed.
    """

    def __init__(self, predicted: Any, before: "Model | None" = None) -> None:
        arrays = predicted.arrays()
        labels = self.labels = np.asarray(predicted.labels).reshape(-1)
        p = self.compared = np.asarray(predicted.compared, np.float64)
        right = None
        self.is_binary = "probabilities" in arrays and p.ndim == 1
        if self.is_binary:
            right = (p > 0.5) == (labels == 1)
            losses = data_summary.losses(labels, p)
        elif "probabilities" in arrays:
            p = self.compared = p.reshape(-1, p.shape[-1])
            right = p.argmax(axis=1) == labels
            losses = data_summary.losses(labels, p)
        else:
            p = self.compared = p.reshape(-1)
            if "predicted_labels" in arrays:
                right = arrays["predicted_labels"].reshape(-1) == labels
            losses = data_summary.losses(np.ones(len(p)), p)
        self.means = {"log_loss": losses}
        if right is not None:
            self.means["accuracy"] = right
        if before:
            gaps = np.abs(p - before.compared)
            # For classes, the total variation distance.
            self.means["churn"] = (
                gaps if gaps.ndim == 1 else gaps.sum(axis=1) / 2
            )
            if right is not None and "accuracy" in before.means:
                other = before.means["accuracy"]
                self.means["negative_flips"] = other & ~right
                self.means["positive_flips"] = right & ~other

    def is_ranked(self, rows: Any = np.s_[:]) -> bool:
        """Whether it is of clicks, some and not all of them."""
        return self.is_binary and 0 < self.labels[rows].mean() < 1

    def figures(self, rows: Any = np.s_[:]) -> dict[str, float]:
        """Returns how good it is on some rows, and what has changed."""
        found = {name: row[rows].mean() for name, row in self.means.items()}
        if self.is_ranked(rows):
            labels, p = self.labels[rows], self.compared[rows]
            found |= predictions.click_figures(labels, p)
            found["offset"] = predictions.calibration(labels, p)[0]
            said, came, counts = np.transpose(curve(labels, p))
            found["calibration_error"] = np.abs(said - came) @ counts / len(p)
        return {name: float(value) for name, value in found.items()}


def curve(
    labels: np.ndarray, probabilities: np.ndarray
) -> list[tuple[float, float, int]]:
    """Returns mean prediction, mean label and rows of bins of equal size."""
    order = np.argsort(probabilities, kind="stable")
    return [
        (float(probabilities[r].mean()), float(labels[r].mean()), len(r))
        for r in np.array_split(order, _CALIBRATION_BINS)
        if len(r)
    ]


def _auc_parts(model: Model) -> tuple[float, np.ndarray]:
    """The AUC, and what each row adds to its error (DeLong et al. 1988)."""
    is_one, p = model.labels == 1, model.compared
    ones, zeros = int(is_one.sum()), int((~is_one).sum())
    ranks = predictions.ranks(p)
    within = np.zeros(len(p))
    for side in (is_one, ~is_one):
        within[side] = predictions.ranks(p[side])
    # Share of the other side's rows that lie below.
    below = (ranks - within) / np.where(is_one, zeros, ones)
    won = np.where(is_one, below, 1 - below)
    auc = float(won[is_one].mean())
    return auc, (won - auc) * len(p) / np.where(is_one, ones, zeros)


def _parts(
    one: Model, other: Model | None, slices: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, np.ndarray]]:
    """Each figure that has an interval, and what each row adds to its error.

    To first order all are means of these, so that one resample serves all.
    """
    size = len(one.labels)
    found: dict[str, tuple[float, np.ndarray]] = {}

    def mean(name: str, values: np.ndarray, rows: Any = np.s_[:]) -> None:
        centre, parts = values[rows].mean(), np.zeros(size)
        parts[rows] = (values[rows] - centre) * size / len(values[rows])
        found[name] = float(centre), parts

    if one.is_ranked():
        offset, _ = predictions.calibration(one.labels, one.compared)
        p = np.clip(one.compared, 1e-7, 1 - 1e-7)
        p = 1 / (1 + (1 - p) / p * math.exp(-offset))
        found["offset"] = offset, (one.labels - p) / np.mean(p * (1 - p))
    if other is None:
        return found
    change = one.means["log_loss"] - other.means["log_loss"]
    mean("log_loss", change)
    mean("churn", one.means["churn"])
    if one.is_ranked():
        (auc, parts), (base, others) = _auc_parts(one), _auc_parts(other)
        found["auc"] = auc - base, parts - others
    if "negative_flips" in one.means:
        flips = one.means["negative_flips"] * 1.0 - one.means["positive_flips"]
        mean("net_flips", flips)
    for name, rows in slices.items():
        mean(SLICE + name, change, rows)
    return found


def estimates(
    models: Sequence[Model],
    before: Model | None,
    slices: Mapping[str, np.ndarray],
    *,
    confidence: float,
) -> dict[str, Any]:
    """Returns each figure's mean over retrains and its interval.

    By a paired bootstrap: a row is drawn a Poisson number of times, the same in
    all retrains and for all figures (Chamandy et al. 2012, "Estimating
    Uncertainty for Massive Data Streams"), and then retrains are drawn. The
    intervals of slices are as wide as the worst of all slices needs them, by
    the same draws (max-t: Romano and Wolf 2005, "Exact and Approximate Stepdown
    Methods").
    """
    found = [_parts(one, before, slices) for one in models]
    names = list(found[0])
    if not names:  # For classes, if there is no earlier version.
        return {}
    values = np.array([[one[name][0] for name in names] for one in found])
    parts = np.array([[one[name][1] for name in names] for one in found])
    retrains, _, size = parts.shape
    rng = np.random.default_rng(0)
    blocks = min(size, _MOST_BLOCKS)
    starts = np.linspace(0, size, blocks, endpoint=False).astype(np.int64)
    shuffled = parts[..., rng.permutation(size)]
    sums = np.add.reduceat(shuffled, starts, axis=2) / size
    drawn = np.empty((_NUM_RESAMPLES, len(names)))
    for row in drawn:
        of_each = sums @ rng.poisson(1, blocks) + values
        row[:] = of_each[rng.integers(0, retrains, retrains)].mean(axis=0)
    means, errors = values.mean(axis=0), drawn.std(axis=0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    of_slices = np.array([name.startswith(SLICE) for name in names])
    if of_slices.any():
        scaled = np.abs(drawn - means) / np.maximum(errors, 1e-12)
        most = np.quantile(scaled[:, of_slices].max(axis=1), confidence)
        low = np.where(of_slices, means - most * errors, low)
        high = np.where(of_slices, means + most * errors, high)
    return {
        name: {"value": value, "interval": ends}
        for name, value, ends in zip(
            names, means.tolist(), np.c_[low, high].tolist(), strict=True
        )
    }
