"""report.json: every figure, with the values that it was made from.

Imports neither TensorFlow nor Keras.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from launch.comparison import collect
from launch.comparison import curves as curves_lib
from launch.comparison import notes
from launch.comparison import statistics
from launch.comparison import target as target_lib
from launch.comparison import verdict

BASELINE = notes.BASELINE
Trials = notes.Trials


def make(
    methods: Mapping[str, Trials],
    *,
    target: str,
    descriptions: Mapping[str, str],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the whole report, as JSON has it.

    Args:
        methods: Name of each method to its finished trials, one or more.
        target: As for `target.make`.
        descriptions: Name of each method to what it is.
        context: What else the report tells: the configuration and the like.
    """
    baseline = methods.get(BASELINE, ())
    aim = None
    if baseline or target not in target_lib.NAMED:
        aim = target_lib.make(target, _curves(baseline))
    found = _figures(methods, descriptions, aim)
    return {
        **context,
        "confidence": statistics.CONFIDENCE,
        "target": aim.to_tree() if aim else None,
        "notes": [
            *context.get("notes", ()),
            *notes.of(
                methods,
                found,
                target=target,
                loss=aim.value if aim else None,
                budget=context.get("setup", {}).get("budget"),
            ),
        ],
        "methods": found,
    }


def _figures(
    methods: Mapping[str, Trials],
    descriptions: Mapping[str, str],
    aim: target_lib.Target | None,
) -> dict[str, dict[str, Any]]:
    # Between all pairs of trials: the dearest figure, made once a method.
    churn = {
        name: collect.churn_matrices(trials) for name, trials in methods.items()
    }
    baseline = methods.get(BASELINE, ())
    found: dict[str, dict[str, Any]] = {}
    for name, trials in methods.items():
        figures = {
            "describe": descriptions[name],
            **_method(trials, churn[name], aim),
        }
        if baseline and name != BASELINE:
            figures["versus_independent"] = {
                **_versus(trials, baseline, aim),
                **_versus_churn(churn[name], churn[BASELINE]),
            }
            if aim is not None:
                figures["verdict"] = verdict.of(name, figures, target=aim.value)
        found[name] = figures
    return found


def _method(
    trials: Trials,
    churn: Mapping[str, np.ndarray],
    aim: target_lib.Target | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_trials": len(trials),
        "figures": {
            # A short trial may have heard no teacher, and have no staleness.
            name: statistics.over_trials(
                [t.figures[name] for t in trials if name in t.figures]
            ).to_tree()
            for name in {n: None for t in trials for n in t.figures}
        },
        "churn": {
            name: statistics.over_pairs(matrix).to_tree()
            for name, matrix in churn.items()
        },
        "spread": {
            name: estimate.to_tree()
            for name, estimate in collect.spread(trials).items()
        },
        "trials": [_trial(trial) for trial in trials],
    }
    curves = _curves(trials)
    if aim and curves:
        found |= _to_target(trials, aim.value)
    return found


def _trial(trial: collect.Finished) -> dict[str, Any]:
    curve = trial.curve
    return {
        "seed": trial.seed,
        "runs": list(trial.directories),
        "copies": list(trial.copies),
        "figures": trial.figures,
        "curve": None
        if curve is None
        else {
            "steps": list(curve.steps),
            curves_lib.METRIC: [
                value if math.isfinite(value) else None
                for value in curve.values
            ],
            "seconds": list(curve.seconds),
        },
    }


def _to_target(trials: Trials, loss: float) -> dict[str, Any]:
    reached = [
        (
            place[0],
            _examples(trial, place[0]),
            # A teacher had to be trained before.
            place[1] + trial.figures["teacher_seconds"],
        )
        for trial in trials
        if trial.curve is not None
        for place in [trial.curve.reaches(loss)]
        if place is not None
    ]
    found: dict[str, Any] = {"reached": len(reached)}
    if reached:
        columns = {
            "steps_to_target": [step for step, _, _ in reached],
            "examples_to_target": [examples for _, examples, _ in reached],
            "seconds_to_target": [seconds for _, _, seconds in reached],
        }
        found |= {
            name: statistics.over_trials(values).to_tree()
            for name, values in columns.items()
        }
    return found


def _examples(trial: collect.Finished, step: float) -> float:
    """Examples of all groups up to a step, and all of a teacher's before."""
    before = trial.figures["total_examples"] - trial.figures["student_examples"]
    return before + _examples_per_step(trial) * step


def _examples_per_step(trial: collect.Finished) -> float:
    """Of all groups together, while the students are trained."""
    return trial.figures["student_examples"] / trial.curve.steps[-1]  # type: ignore[union-attr]


def _versus(
    trials: Trials, baseline: Trials, aim: target_lib.Target | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_trials": len(baseline),
        "examples": float(
            np.mean([t.figures["total_examples"] for t in trials])
            / np.mean([t.figures["total_examples"] for t in baseline])
        ),
    }
    for name in (curves_lib.METRIC, f"best_{curves_lib.METRIC}"):
        if all(name in t.figures for t in (*trials, *baseline)):
            value, interval = statistics.difference(
                [trial.figures[name] for trial in trials],
                [trial.figures[name] for trial in baseline],
            )
            found[name] = {"difference": value, "interval": interval}
    curves = _curves(trials)
    if curves:
        ours_per_step, theirs_per_step = (
            np.mean([_examples_per_step(trial) for trial in side])
            for side in (trials, baseline)
        )
        found["examples_per_step"] = float(ours_per_step / theirs_per_step)
    if aim and curves:
        steps = target_lib.compare_steps(aim, curves, _curves(baseline))
        if steps is not None:
            found["steps_to_target"] = {
                "ratio": steps[0],
                "interval": steps[1],
            }
    return found


def _versus_churn(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ours.keys() & theirs.keys():
        value, interval = statistics.ratio_of_pairs(ours[name], theirs[name])
        # Where retrains of independent agree, there is no multiple of that.
        found[name] = {
            "ratio": value if math.isfinite(value) else None,
            "interval": interval,
        }
    return found


def _curves(trials: Trials) -> list[curves_lib.Curve]:
    return [trial.curve for trial in trials if trial.curve is not None]
