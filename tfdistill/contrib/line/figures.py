"""How good models are on held-out rows, what has changed, and how surely.

Reads nothing, and imports neither TensorFlow nor Keras.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill import metrics
from tfdistill.statistics import estimates as estimates_lib

# Before the name of a slice whose log loss is estimated.
SLICE = "slice "


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
            losses = metrics.log_losses(labels, p)
        elif "probabilities" in arrays:
            p = self.compared = p.reshape(-1, p.shape[-1])
            right = p.argmax(axis=1) == labels
            losses = metrics.log_losses(labels, p)
        else:
            p = self.compared = p.reshape(-1)
            if "predicted_labels" in arrays:
                right = arrays["predicted_labels"].reshape(-1) == labels
            losses = metrics.log_losses(np.ones(len(p)), p)
        self.means = {"log_loss": losses}
        if right is not None:
            self.means["accuracy"] = right
        if before:
            self.means["churn"] = metrics.distances(p, before.compared)
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
            found |= metrics.click_quality(labels, p)
            found["offset"] = metrics.calibration_offset(labels, p)[0]
            said, came, counts = np.transpose(
                metrics.calibration_curve(labels, p)
            )
            found["calibration_error"] = np.abs(said - came) @ counts / len(p)
        return {name: float(value) for name, value in found.items()}


def _parts(
    one: Model, other: Model | None, slices: Mapping[str, np.ndarray]
) -> dict[str, estimates_lib.Parts]:
    """Each figure that has an interval, and what each row adds to its error."""
    found: dict[str, estimates_lib.Parts] = {}
    if one.is_ranked():
        pair = one.labels, one.compared
        found["offset"] = estimates_lib.offset_parts(*pair)
    if other is None:
        return found
    change = one.means["log_loss"] - other.means["log_loss"]
    found["log_loss"] = estimates_lib.mean_parts(change)
    found["churn"] = estimates_lib.mean_parts(one.means["churn"])
    if one.is_ranked():
        auc, parts = estimates_lib.auc_parts(*pair)
        base, others = estimates_lib.auc_parts(other.labels, other.compared)
        found["auc"] = auc - base, parts - others
    if "negative_flips" in one.means:
        flips = one.means["negative_flips"] * 1.0 - one.means["positive_flips"]
        found["net_flips"] = estimates_lib.mean_parts(flips)
    for name, rows in slices.items():
        found[SLICE + name] = estimates_lib.mean_parts(change, rows)
    return found


def estimates(
    models: Sequence[Model],
    before: Model | None,
    slices: Mapping[str, np.ndarray],
    *,
    confidence: float,
) -> dict[str, Any]:
    """Returns each figure's mean over retrains and its interval.

    Those of slices hold all at once.
    """
    found = [_parts(one, before, slices) for one in models]
    names = list(found[0])
    if not names:  # For classes, if there is no earlier version.
        return {}
    means, intervals = estimates_lib.over_rows(
        np.array([[one[name][0] for name in names] for one in found]),
        np.array([[one[name][1] for name in names] for one in found]),
        confidence=confidence,
        together=np.array([name.startswith(SLICE) for name in names]),
    )
    return {
        name: {"value": value, "interval": ends}
        for name, value, ends in zip(
            names, means.tolist(), intervals.tolist(), strict=True
        )
    }
