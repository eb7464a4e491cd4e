"""The validation loss that steps are counted to, and how sure the count is.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.comparison import curves as curves_lib
from launch.comparison import statistics

NAMED = ("final", "best")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A loss, and how many steps `independent` takes to it.

    Attributes:
        kind: `"final"` or `"best"`: the mean of those losses of the
            independent trials, each of which takes to it what it took to its
            own; or `"given"`.
        value: The loss, in nats.
    """

    kind: str
    value: float

    def to_tree(self) -> dict[str, Any]:
        """Returns what JSON has of it."""
        return {"metric": curves_lib.METRIC, **dataclasses.asdict(self)}


def check(text: str) -> None:
    """Checks what a command line asks for.

    Raises:
        ValueError: If it is no loss.
    """
    if text in NAMED:
        return
    try:
        fits = math.isfinite(float(text))
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"--target must be {', '.join(NAMED)} or a number of nats; "
            f"received {text!r}."
        )


def make(text: str, independent: Sequence[curves_lib.Curve]) -> Target:
    """Returns the target that a command line asks for.

    Args:
        text: `"final"`, `"best"`, or a number.
        independent: Curves of the independent trials.
    """
    if text not in NAMED:
        return Target(kind="given", value=float(text))
    losses = [_loss(curve, text) for curve in independent]
    return Target(kind=text, value=float(np.mean(losses)))


def compare_steps(
    target: Target,
    curves: Sequence[curves_lib.Curve],
    independent: Sequence[curves_lib.Curve],
) -> tuple[float, tuple[float, float] | None] | None:
    """Returns a method's steps as a multiple of `independent`'s.

    A target that was estimated from the independent trials is estimated anew
    from each resample of them, so that the interval knows of that too.

    Args:
        target: The loss.
        curves: Of the method's trials.
        independent: Of the independent trials.

    Returns:
        The ratio and its interval; None if a trial did not reach the target.
        The interval is None where resamples have targets out of reach.
    """
    steps = [_steps(curve, target.value) for curve in curves]
    if None in steps:
        return None
    if target.kind == "given":
        others = [_steps(curve, target.value) for curve in independent]
        return None if None in others else statistics.ratio(steps, others)  # type: ignore[arg-type]
    base = float(np.mean([_own(curve, target.kind) for curve in independent]))
    value = float(np.mean(steps)) / base  # type: ignore[arg-type]

    losses = np.array([_loss(curve, target.kind) for curve in independent])
    own = np.array([_own(curve, target.kind) for curve in independent])

    @functools.cache  # Few trials have few different resamples.
    def steps_to(index: int, loss: float) -> float:
        found = _steps(curves[index], loss)
        return np.nan if found is None else found

    def resampled(ours: np.ndarray, theirs: np.ndarray) -> float:
        loss = float(losses[np.sort(theirs)].mean())
        found = [steps_to(index, loss) for index in ours.tolist()]
        return sum(found) / len(found) / float(own[theirs].mean())

    return value, statistics.of_resamples(
        resampled, len(curves), len(independent)
    )


def _steps(curve: curves_lib.Curve, loss: float) -> float | None:
    found = curve.reaches(loss)
    return found[0] if found else None


def _loss(curve: curves_lib.Curve, kind: str) -> float:
    return min(curve.values) if kind == "best" else curve.values[-1]


def _own(curve: curves_lib.Curve, kind: str) -> float:
    """Steps that an independent trial took to its own final or best loss.

    To the first time, as for everyone else: a curve that has long been flat, or
    was lower before, did not need all of its steps for its final loss.
    """
    found = curve.reaches(_loss(curve, kind))
    return found[0] if found else float(curve.steps[-1])
