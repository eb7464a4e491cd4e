"""report.json: every figure, with the values that it was made from.

Imports neither TensorFlow nor Keras.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.comparison import collect
from launch.comparison import curves as curves_lib
from launch.comparison import statistics
from launch.comparison import target as target_lib
from launch.comparison import verdict

BASELINE = "independent"
Trials = Sequence[collect.Finished]


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
    found = {
        name: {
            "describe": descriptions[name],
            **_method(trials, baseline if name != BASELINE else (), aim),
        }
        for name, trials in methods.items()
    }
    for name, figures in found.items():
        if aim is not None and "versus_independent" in figures:
            figures["verdict"] = verdict.of(name, figures, target=aim.value)
    return {
        **context,
        "confidence": statistics.CONFIDENCE,
        "target": aim.to_tree() if aim else None,
        "notes": [*context.get("notes", ()), *_notes(found, target)],
        "methods": found,
    }


def _method(
    trials: Trials, baseline: Trials, aim: target_lib.Target | None
) -> dict[str, Any]:
    matrices = collect.churn_matrices(trials)
    found: dict[str, Any] = {
        "num_trials": len(trials),
        "figures": {
            name: statistics.over_trials(
                [trial.figures[name] for trial in trials]
            ).to_tree()
            for name in trials[0].figures
        },
        "churn": {
            name: statistics.over_pairs(matrix).to_tree()
            for name, matrix in matrices.items()
        },
        "spread": collect.spread(trials),
        "trials": [_trial(trial) for trial in trials],
    }
    curves = _curves(trials)
    if aim and curves:
        found |= _to_target(trials, aim.value)
    if baseline:
        found["versus_independent"] = _versus(trials, baseline, aim)
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
        (place, _examples(trial, place[0]))
        for trial in trials
        if trial.curve is not None
        for place in [trial.curve.reaches(loss)]
        if place is not None
    ]
    found: dict[str, Any] = {"reached": len(reached)}
    if reached:
        columns = {
            "steps_to_target": [place[0] for place, _ in reached],
            "examples_to_target": [examples for _, examples in reached],
            "seconds_to_target": [place[1] for place, _ in reached],
        }
        found |= {
            name: statistics.over_trials(values).to_tree()
            for name, values in columns.items()
        }
    return found


def _examples(trial: collect.Finished, step: float) -> float:
    """Examples of all groups up to a step, and all of a teacher's before."""
    students = trial.figures["student_examples"]
    before = trial.figures["total_examples"] - students
    return before + students * step / trial.curve.steps[-1]  # type: ignore[union-attr]


def _versus(
    trials: Trials, baseline: Trials, aim: target_lib.Target | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "examples": float(
            np.mean([t.figures["total_examples"] for t in trials])
            / np.mean([t.figures["total_examples"] for t in baseline])
        )
    }
    for name in (curves_lib.METRIC, f"best_{curves_lib.METRIC}"):
        if all(name in t.figures for t in (*trials, *baseline)):
            value, interval = statistics.difference(
                [trial.figures[name] for trial in trials],
                [trial.figures[name] for trial in baseline],
            )
            found[name] = {"difference": value, "interval": interval}
    ours, theirs = map(collect.churn_matrices, (trials, baseline))
    for name in ours.keys() & theirs.keys():
        value, interval = statistics.ratio_of_pairs(ours[name], theirs[name])
        found[name] = {"ratio": value, "interval": interval}
    curves = _curves(trials)
    if aim and curves:
        steps = target_lib.compare_steps(aim, curves, _curves(baseline))
        if steps is not None:
            found["steps_to_target"] = {
                "ratio": steps[0],
                "interval": steps[1],
            }
    return found


def _curves(trials: Trials) -> list[curves_lib.Curve]:
    return [trial.curve for trial in trials if trial.curve is not None]


def _notes(found: Mapping[str, Any], target: str) -> list[str]:
    """What a reader must know to read the figures right."""
    notes = []
    for name, figures in found.items():
        values = figures["figures"]
        best = values.get(f"best_{curves_lib.METRIC}")
        final = values[curves_lib.METRIC]
        error = final["standard_error"] or 0.0
        if best and final["mean"] - best["mean"] > max(2 * error, 1e-3):
            notes.append(
                f"{name} is past its best: its final log loss is "
                f"{final['mean']:.4f}, its best {best['mean']:.4f}. "
                + (
                    "Steps to a final loss flatter the others; use "
                    "--target=best or fewer steps."
                    if name == BASELINE and target == "final"
                    else ""
                )
            )
    if BASELINE not in found:
        notes.append(
            f"Without the method {BASELINE} nothing is compared with it."
        )
    examples = {
        name: np.mean(figures["figures"]["total_examples"]["mean"])
        for name, figures in found.items()
    }
    if len(set(examples.values())) > 1:
        shares = ", ".join(
            f"{name} {value:,.0f}" for name, value in examples.items()
        )
        notes.append(
            "The methods were given different numbers of training examples "
            f"in all: {shares}. With --budget=total all get the same."
        )
    return [note.strip() for note in notes]
