"""Reads what finished runs have left behind, a trial at a time.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from tfdistill.comparison import trials as trials_lib
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.statistics import estimates

# The validation figures that models are judged by, in words; each has one.
METRICS = {
    "log_loss": "log loss",
    "unexplained_variance": "unexplained variance",
}
# What curves and targets are about: in nats, or in the unit of a loss.
LOG_LOSS, LOSS = "log_loss", "loss"
_CURVES = (f"val_{LOG_LOSS}", f"val_{LOSS}")
NAMED = ("final", "best")
Directory = Callable[[trials_lib.Run], pathlib.Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation loss at each evaluation; the mean over groups.

    The log loss, in nats, of what predicts probabilities.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    seconds: tuple[float, ...]

    def reaches(self, target: float) -> tuple[float, float] | None:
        """Returns the step and second at which a target is first reached.

        Between two evaluations both are interpolated linearly.
        """
        below = [index for index, v in enumerate(self.values) if v <= target]
        if not below:
            return None
        index = below[0]
        if not index:
            return float(self.steps[0]), self.seconds[0]
        # After a diverged evaluation, at infinity, it is the later of the two.
        ends = self.values[index], self.values[index - 1]
        step, second = (
            float(np.interp(target, ends, (known[index], known[index - 1])))
            for known in (self.steps, self.seconds)
        )
        return step, second

    def loss(self, kind: str) -> float:
        """Returns the `"final"` or the `"best"` loss."""
        return min(self.values) if kind == "best" else self.values[-1]

    def steps_to(self, target: float) -> float | None:
        """Returns the steps in which a target is first reached."""
        found = self.reaches(target)
        return found[0] if found else None


class Taught(NamedTuple):
    """In what share of the steps with a weight a group had a teacher, and why.

    With several teachers, the share is from the teacher used longest.
    """

    share: float
    group: int
    why: str


def _taught_of(results: Iterable[Mapping[str, Any]]) -> list[Taught]:
    """Reads it in the results of groups, except for those without teachers."""
    found = []
    for result in results:
        of_each = []
        for teacher in result["teachers"]:
            # Results of before these were counted have versions, or none.
            swaps = teacher.get("swaps", 1)
            due = max(teacher.get("num_due", swaps), 1)
            share = teacher.get("num_taught", swaps) / due
            of_each.append(Taught(share, result["group"], _why(teacher)))
        found += [max(of_each)] if of_each else []
    return found


def _why(teacher: Mapping[str, Any]) -> str:
    refused = teacher.get("quarantined") or {}
    if refused:
        last = max(refused, key=int)
        return (
            f"its teacher had {teacher['num_quarantined']} refused version(s), "
            f"most recently version {last}: {refused[last]}"
        )
    if reason := teacher.get("reason"):
        return f"at the end, its teacher was {teacher['health']}: {reason}"
    return (
        "its teacher's first version came late or was too old by then, or the "
        "teacher waited for a better version in between"
    )


class Group:
    """What a group has left behind, each file read once."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads nothing yet; `path` is its directory."""
        self.path = path

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """Its results."""
        return outputs.read_results(self.path)

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of its log, from the last `fit` that ended an epoch."""
        found = outputs.read_records(self.path)
        ended = [r for r in found if r.get("event") == "epoch_end"]
        fit = ended[-1].get("fit", 1) if ended else 1
        return [r for r in found if r.get("fit", 1) == fit]

    @property
    def was_resumed(self) -> bool:
        """Whether it was interrupted, and resumed from a backup."""
        return sum(r.get("event") == "start" for r in self.records) > 1

    def curve(self) -> list[tuple[float, float, float]]:
        """Returns step, validation loss and second of each evaluation."""
        start = self.records[0]["time"] + self.results["waited_seconds"]
        # By step: a run that resumed from a backup has some of them twice.
        found = {}
        for record in self.records:
            if record.get("event") == "epoch_end":
                # A script may have another metric, or evaluate nothing.
                names = [n for n in _CURVES if n in record]
                if not names:
                    return []
                loss = record[names[0]]
                # A diverged run has null there: worse than any target.
                loss = math.inf if loss is None else loss
                found[record["step"]] = loss, record["time"] - start
        return [(step, *found[step]) for step in sorted(found)]


def read(groups: Sequence[Group]) -> Curve | None:
    """Returns the mean curve of several groups; None without evaluations."""
    found = [group.curve() for group in groups]
    length = min(len(curve) for curve in found)
    if not length:
        return None
    steps, values, seconds = np.mean(
        [curve[:length] for curve in found], axis=0
    ).T
    return Curve(
        steps=tuple(int(step) for step in steps),
        values=tuple(values.tolist()),
        seconds=tuple(seconds.tolist()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """One trial with its results.

    There are `predictions` and figures (`copies`) for each copy of the model
    that the method makes, and their mean (`figures`). An ensemble, which is not
    trained as one, has no curve. The seconds of a trial that was `resumed` from
    a backup cover only the last part. `least_taught` is its group that had a
    teacher in the fewest steps, if groups have teachers.
    """

    seed: int
    directories: tuple[str, ...]
    predictions: tuple[Any, ...]
    figures: dict[str, float]
    copies: tuple[dict[str, float], ...]
    curve: Curve | None
    resumed: bool = False
    least_taught: Taught | None = None


def collect(
    trial: trials_lib.Trial,
    *,
    seed: int,
    workdir: pathlib.Path,
    directory: Directory,
) -> Finished:
    """Reads one trial, all of whose runs are done."""
    by_run = {
        run.key: [
            Group(outputs.group_dir(directory(run), group))
            for group in range(run.num_groups)
        ]
        for run in trial.runs
    }
    groups = [group for run in trial.students for group in by_run[run.key]]
    found = [predictions.read(group.path) for group in groups]
    if trial.averaged:
        found = [type(found[0]).mean(found)]
    copies = [one.figures() for one in found]
    figures = predictions.means(copies)
    curve = None if trial.averaged else read(groups)
    if curve is not None and LOG_LOSS in figures:
        figures[f"best_{LOG_LOSS}"] = curve.loss("best")
    figures |= _cost(trial, by_run) | _exchanged(trial, groups)
    figures |= {
        f"between_groups_{name}": value
        for name, value in predictions.between(found).items()
    }
    return Finished(
        seed=seed,
        directories=tuple(
            directory(run).relative_to(workdir).as_posix() for run in trial.runs
        ),
        predictions=tuple(found),
        figures=figures,
        copies=tuple(copies),
        curve=curve,
        resumed=any(group.was_resumed for group in groups),
        least_taught=None
        if len(trial.students) > 1
        else min(_taught_of(group.results for group in groups), default=None),
    )


def metric_in(figures: Mapping[str, Any]) -> str:
    """Returns the name of the figure that a model is judged by."""
    return next(name for name in METRICS if name in figures)


def curve_of(figures: Mapping[str, Any]) -> str:
    """Returns the name of what a model's curve shows."""
    return LOG_LOSS if LOG_LOSS in figures else LOSS


def churn_matrices(trials: Sequence[Finished]) -> dict[str, np.ndarray]:
    """Returns how far each pair of retrains is apart, by measure.

    With several copies, each is compared with the same one of the other
    trial, and the mean taken.

    Symmetric, `[trials, trials]`; none for a single trial.
    """
    size, found = len(trials), dict[str, np.ndarray]()
    for row in range(size):
        for column in range(row):
            pairs = zip(
                trials[row].predictions,
                trials[column].predictions,
                strict=True,
            )
            means = predictions.means(
                [one.churn(other) for one, other in pairs]
            )
            for name, value in means.items():
                matrix = found.setdefault(name, np.zeros([size, size]))
                matrix[row, column] = matrix[column, row] = value
    return found


def spread(trials: Sequence[Finished]) -> dict[str, estimates.Estimate]:
    """Returns how far retrains are from their mean, by measure."""
    if len(trials) < 2:
        return {}

    def apart(trials: Sequence[Finished]) -> dict[str, float]:
        copies = zip(*(trial.predictions for trial in trials), strict=True)
        return predictions.means(
            [type(copy[0]).spread(copy) for copy in copies]
        )

    left_out = [
        apart([*trials[:index], *trials[index + 1 :]])
        for index in range(len(trials) if len(trials) > 2 else 0)
    ]
    return {
        name: estimates.jackknifed(value, [one[name] for one in left_out])
        for name, value in apart(trials).items()
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _cost(
    trial: trials_lib.Trial, by_run: Mapping[str, Sequence[Group]]
) -> dict[str, float]:
    """What training took in a trial, the first trace included."""
    found = {
        key: [group.results for group in groups]
        for key, groups in by_run.items()
    }
    groups = [group for run in trial.runs for group in found[run.key]]
    students = [group for run in trial.students for group in found[run.key]]
    before = sum(
        _slowest(found[run.key])
        for run in trial.runs
        if run not in trial.students
    )
    rates = [
        group["examples_per_second"] * group["steps"] / group["examples"]
        for group in students
    ]
    return {
        "total_steps": sum(group["steps"] for group in groups),
        "total_examples": sum(group["examples"] for group in groups),
        "student_examples": sum(group["examples"] for group in students),
        "teacher_seconds": before,
        "seconds": before + _slowest(students),
        "process_seconds": sum(group["process_seconds"] for group in groups),
        "seconds_per_step": float(1 / np.mean(rates)),
    }


def _slowest(groups: Sequence[dict[str, Any]]) -> float:
    return max(group["seconds"] - group["waited_seconds"] for group in groups)


def _exchanged(
    trial: trials_lib.Trial,
    groups: Sequence[Group],
) -> dict[str, float]:
    """What groups that teach each other sent.

    A group of all workers sends its gradients over the slow links that lie
    between groups otherwise: an all-reduce moves about the size of the
    parameters at every step.
    """
    (run, *others) = trial.students
    results = [group.results for group in groups]
    steps, size = results[0]["steps"], results[0]["parameter_bytes"]
    if run.part == trials_lib.LARGE_GROUP:
        return {"slow_bytes_per_step": float(size)}
    teachers = [teacher for result in results for teacher in result["teachers"]]
    mixing = [result["mixing"] for result in results if "mixing" in result]
    # The versions of a group's own past travel nowhere.
    if teachers and all("swaps" in t and "bytes" not in t for t in teachers):
        return _shares(results)
    if others or run.num_groups < 2 or not (teachers or mixing):
        return {}
    sent, received = (
        sum(t.get(name, 0) for t in teachers) / len(results)
        for name in ("sent_bytes", "bytes")
    )
    sends_predictions = any("sent_bytes" in teacher for teacher in teachers)
    if not sends_predictions:
        sent += _mean(result["exports"]["bytes"] for result in results)
    found = _taught(results, sends_predictions) if teachers else {}
    if mixing:
        received += _mean(mixed["bytes"] for mixed in mixing)
        found["mixes"] = _mean(mixed["mixes"] for mixed in mixing)
        found["mixes_left_out"] = _mean(mixed["skipped"] for mixed in mixing)
    found |= {
        "bytes_written": sent,
        "bytes_read": received,
        "slow_bytes_per_step": received / steps,
    }
    stale = [
        record["teacher_staleness"]
        for group in groups
        for record in group.records
        if record.get("teacher_staleness") is not None
    ]
    return {**found, "teacher_staleness": _mean(stale)} if stale else found


def _taught(
    results: Sequence[dict[str, Any]], sends_predictions: bool
) -> dict[str, float]:
    """What groups heard of their teachers: versions, or answers on batches."""

    def totals(name: str) -> list[int]:
        return [sum(t[name] for t in r["teachers"]) for r in results]

    if sends_predictions:
        answers, missed = sum(totals("num_answers")), sum(totals("num_missed"))
        return {
            "answered": answers / max(1, answers + missed),
            "groups_without_teacher": float(totals("num_answers").count(0)),
        }
    steps, every = results[0]["steps"], results[0]["exports"]["every_steps"]
    return {
        "versions_written": _mean(r["exports"]["published"] for r in results),
        "versions_read": _mean(totals("swaps")),
        # After the burn-in. That of the last step has no reader in its run.
        "versions_due": _mean(
            sum((t.get("num_due", steps) - 1) // every for t in r["teachers"])
            for r in results
        ),
        **_shares(results),
    }


def _shares(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """In what share of steps groups had a teacher, and how many never had."""
    found = _taught_of(results)
    if not found:
        return {}
    return {
        "taught": _mean(each.share for each in found),
        "groups_without_teacher": float(sum(not each.share for each in found)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A loss, and how many steps `independent` takes to it.

    Attributes:
        kind: `"final"` or `"best"`: the mean of those losses of the
            independent trials, each of which takes to it what it took to its
            own; or `"given"`.
        value: The loss, of which nats if it is a log loss.
    """

    kind: str
    value: float


def check(text: str) -> None:
    """Checks what a command line asks for."""
    try:
        fits = text in NAMED or math.isfinite(float(text))
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"--target must be {', '.join(NAMED)} or a validation loss; "
            f"received {text!r}."
        )


def make(text: str, independent: Sequence[Curve]) -> Target:
    """Returns the target: `"final"`, `"best"`, or a number as text."""
    if text not in NAMED:
        return Target(kind="given", value=float(text))
    return Target(kind=text, value=_mean(one.loss(text) for one in independent))


def compare_steps(
    target: Target,
    curves: Sequence[Curve],
    independent: Sequence[Curve],
) -> tuple[float, tuple[float, float] | None] | None:
    """Returns a method's steps as a multiple of `independent`'s.

    A target that was estimated from the independent trials is estimated again
    from each resample of them, so that the interval includes that uncertainty.

    With its interval, which is None if resamples have targets one of their
    trials did not reach. None if a trial did not reach the target.
    """
    steps = [curve.steps_to(target.value) for curve in curves]
    if None in steps:
        return None
    if target.kind == "given":
        others = [curve.steps_to(target.value) for curve in independent]
        return None if None in others else estimates.ratio(steps, others)  # type: ignore[arg-type]
    losses = np.array([curve.loss(target.kind) for curve in independent])
    # To the first time, as for everyone else: a curve that has long been flat,
    # or was lower before, did not need all of its steps for its final loss.
    own = np.array(
        [
            curve.steps_to(loss) or curve.steps[-1]
            for curve, loss in zip(independent, losses, strict=True)
        ]
    )

    @functools.cache  # Few trials have few different resamples.
    def steps_to(index: int, loss: float) -> float:
        found = curves[index].steps_to(loss)
        return math.inf if found is None else found

    def resampled(ours: np.ndarray, theirs: np.ndarray) -> float:
        loss = float(losses[np.sort(theirs)].mean())
        found = [steps_to(index, loss) for index in ours.tolist()]
        return sum(found) / len(found) / float(own[theirs].mean())

    return float(np.mean(steps)) / float(own.mean()), estimates.interval(  # type: ignore[arg-type]
        resampled,
        np.arange(len(curves)),
        np.arange(len(independent)),
        vectorized=False,
    )
