"""Reads what finished runs have left behind, a trial at a time.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch import predictions
from launch import run_outputs
from launch.comparison import curves
from launch.comparison import plan
from launch.comparison import statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """One trial with what it came to.

    Attributes:
        seed: Of the trial.
        directories: Of its runs, below the workdir.
        predictions: One for each copy of the model that the method makes.
        figures: Name to value, of the mean over those copies.
        copies: Name to value, for each of those copies.
        curve: None for an ensemble, which is not trained as one.
        went_on: Whether one of its runs was cut short once, and went on from a
            backup: its seconds are of the last part alone.
    """

    seed: int
    directories: tuple[str, ...]
    predictions: tuple[Any, ...]
    figures: dict[str, float]
    copies: tuple[dict[str, float], ...]
    curve: curves.Curve | None
    went_on: bool = False


def collect(
    trial: plan.Trial,
    *,
    seed: int,
    workdir: pathlib.Path,
    directory: Callable[[plan.Run], pathlib.Path],
) -> Finished:
    """Reads one trial, all of whose runs are done.

    Args:
        trial: What was run.
        seed: Its seed.
        workdir: Of the comparison.
        directory: Finds the directory of a run.
    """
    groups = [
        run_outputs.group_dir(directory(run), group)
        for run in trial.students
        for group in range(run.num_groups)
    ]
    found = [predictions.read(path) for path in groups]
    if trial.averaged:
        found = [type(found[0]).mean(found)]
    copies = [one.figures() for one in found]
    means = {
        name: float(np.mean([copy[name] for copy in copies]))
        for name in copies[0]
    }
    curve = None if trial.averaged else curves.read(groups)
    if curve is not None:
        means[f"best_{curves.METRIC}"] = min(curve.values)
    return Finished(
        seed=seed,
        directories=tuple(
            directory(run).relative_to(workdir).as_posix() for run in trial.runs
        ),
        predictions=tuple(found),
        figures={
            **means,
            **_cost(trial, directory),
            **_exchanged(trial, groups),
        }
        | {
            f"between_groups_{name}": value
            for name, value in predictions.between(found).items()
        },
        copies=tuple(copies),
        curve=curve,
        went_on=any(map(curves.went_on, groups)),
    )


def churn_matrices(trials: Sequence[Finished]) -> dict[str, np.ndarray]:
    """Returns how far each pair of retrains is apart, by measure.

    With several copies, each is compared with the same one of the other
    trial, and the mean taken.

    Args:
        trials: Of one method.

    Returns:
        Name to a symmetric `[trials, trials]`; none for a single trial.
    """
    size, found = len(trials), dict[str, np.ndarray]()
    for row in range(size):
        for column in range(row):
            pairs = zip(
                trials[row].predictions,
                trials[column].predictions,
                strict=True,
            )
            churns = [one.churn(other) for one, other in pairs]
            for name in churns[0]:
                value = float(np.mean([churn[name] for churn in churns]))
                matrix = found.setdefault(name, np.zeros([size, size]))
                matrix[row, column] = matrix[column, row] = value
    return found


def spread(trials: Sequence[Finished]) -> dict[str, statistics.Estimate]:
    """Returns how far retrains are from their mean, by measure."""
    if len(trials) < 2:
        return {}
    figures = _spread(trials)
    left_out = [
        _spread([*trials[:index], *trials[index + 1 :]])
        for index in range(len(trials) if len(trials) > 2 else 0)
    ]
    return {
        name: statistics.jackknifed(value, [one[name] for one in left_out])
        for name, value in figures.items()
    }


def _spread(trials: Sequence[Finished]) -> dict[str, float]:
    copies = zip(*(trial.predictions for trial in trials), strict=True)
    found = [type(copy[0]).spread(copy) for copy in copies]
    return {
        name: float(np.mean([one[name] for one in found])) for name in found[0]
    }


def _cost(
    trial: plan.Trial, directory: Callable[[plan.Run], pathlib.Path]
) -> dict[str, float]:
    """What a trial took: of training alone, the first trace included."""
    found = {
        run.key: run_outputs.read_results(directory(run))["groups"]
        for run in trial.runs
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
        "total_steps": trial.num_steps,
        "total_examples": trial.num_examples,
        "student_examples": sum(run.num_examples for run in trial.students),
        "teacher_seconds": before,
        "seconds": before + _slowest(students),
        "process_seconds": sum(group["process_seconds"] for group in groups),
        "seconds_per_step": float(1 / np.mean(rates)),
    }


def _slowest(groups: Sequence[dict[str, Any]]) -> float:
    return max(group["seconds"] - group["waited_seconds"] for group in groups)


def _exchanged(
    trial: plan.Trial, groups: Sequence[pathlib.Path]
) -> dict[str, float]:
    """What groups that teach each other sent, and what else they might have.

    The formulas are per group: an all-reduce moves about the size P of the
    parameters at every step; exports every T steps to n - 1 peers move
    (n - 1) P / T.
    """
    (run, *others) = trial.students
    learns = run.config.codistillation.enabled and run.num_groups > 1
    if others or not learns:
        return {}
    results = list(map(run_outputs.read_results, groups))
    steps, size = run.config.num_steps, results[0]["parameter_bytes"]
    peers = sum(len(result["teachers"]) for result in results) / len(results)
    # The version of the last step is for nobody in this run.
    read = [sum(t["swaps"] for t in r["teachers"]) for r in results]
    due = peers * ((steps - 1) // run.config.exchange.every_steps)
    found = {
        "bytes_written": _mean(r["exports"]["bytes"] for r in results),
        "bytes_read": _mean(
            sum(t["bytes"] for t in r["teachers"]) for r in results
        ),
        "versions_written": _mean(r["exports"]["published"] for r in results),
        "versions_read": _mean(read),
        "versions_due": float(due),
        "groups_without_teacher": float(
            sum(
                not n
                for n, r in zip(read, results, strict=True)
                if r["teachers"]
            )
        ),
        "exchange_formula_bytes": peers
        * size
        * steps
        / run.config.exchange.every_steps,
        "all_reduce_formula_bytes": float(size * steps),
    }
    stale = [
        record["teacher_staleness"]
        for path in groups
        for record in run_outputs.read_records(path)
        if record.get("teacher_staleness") is not None
    ]
    return {**found, "teacher_staleness": _mean(stale)} if stale else found


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
