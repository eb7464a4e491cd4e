"""Validation over training, and where it comes to a target.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch import run_outputs

# The validation figure that curves and targets are about, in nats.
METRIC = "log_loss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation over training, the mean of a trial's groups.

    Attributes:
        steps: Of each evaluation.
        values: Validation log loss, in nats.
        seconds: Since training began, evaluations included.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    seconds: tuple[float, ...]

    def reaches(self, target: float) -> tuple[float, float] | None:
        """Returns the step and second at which a target is first reached.

        Between two evaluations both are interpolated linearly.

        Args:
            target: Validation log loss.

        Returns:
            None if no evaluation is at or below it.
        """
        below = [index for index, v in enumerate(self.values) if v <= target]
        if not below:
            return None
        index = below[0]
        if not index:
            return float(self.steps[0]), self.seconds[0]
        before, after = self.values[index - 1], self.values[index]
        # From a diverged evaluation there is no way to interpolate.
        share = (
            (before - target) / (before - after) if before < math.inf else 1.0
        )
        return tuple(  # type: ignore[return-value]
            known[index - 1] + share * (known[index] - known[index - 1])
            for known in (self.steps, self.seconds)
        )


def read(groups: Sequence[pathlib.Path]) -> Curve:
    """Returns the mean curve of several groups, from their directories."""
    found = [
        _group_curve(
            run_outputs.read_records(path),
            run_outputs.read_results(path)["waited_seconds"],
        )
        for path in groups
    ]
    length = min(len(curve) for curve in found)
    steps, values, seconds = np.mean(
        [curve[:length] for curve in found], axis=0
    ).T
    return Curve(
        steps=tuple(int(step) for step in steps),
        values=tuple(values.tolist()),
        seconds=tuple(seconds.tolist()),
    )


def went_on(group: pathlib.Path) -> bool:
    """Whether a group was cut short once, and went on from a backup."""
    records = run_outputs.read_records(group)
    return sum(record.get("event") == "start" for record in records) > 1


def _group_curve(
    records: Sequence[dict[str, Any]], waited_secs: float
) -> list[tuple[float, float, float]]:
    start = records[0]["time"] + waited_secs
    # By step: a run that went on from a backup has some of them twice.
    found = {
        # A diverged run has null there: worse than any target.
        record["step"]: (
            _number(record.get(f"val_{METRIC}")),
            record["time"] - start,
        )
        for record in records
        if record.get("event") == "epoch_end"
    }
    return [(step, *found[step]) for step in sorted(found)]


def _number(value: float | None) -> float:
    return math.inf if value is None else value
