"""What a reader must know to read the figures right: the report's notes.

Imports neither TensorFlow nor Keras.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.comparison import collect
from launch.comparison import curves as curves_lib

BASELINE = "independent"
Trials = Sequence[collect.Finished]


def of(
    methods: Mapping[str, Trials],
    found: Mapping[str, Any],
    *,
    target: str,
    loss: float | None,
    budget: str | None,
) -> list[str]:
    """Returns the notes, each a sentence or more.

    Args:
        methods: Name of each method to its finished trials, one or more.
        found: Name of each method to its part of the report.
        target: As for `target.make`.
        loss: What that came to, if anything.
        budget: One of `budget.BUDGETS`, if known.
    """
    return [
        *_past_best(found, target),
        *_budgets(found, budget),
        *_examples_judged(methods),
        *_too_early(methods, loss),
        *_went_on(methods),
        *_exchanges(found),
    ]


def _past_best(found: Mapping[str, Any], target: str) -> list[str]:
    notes = []
    for name, figures in found.items():
        values = figures["figures"]
        best = values.get(f"best_{curves_lib.METRIC}")
        final = values[curves_lib.METRIC]
        error = final["standard_error"] or 0.0
        if best and final["mean"] - best["mean"] > max(2 * error, 1e-3):
            notes.append(
                f"{name} is past its best: its final log loss is "
                f"{final['mean']:.4f}, its best {best['mean']:.4f}."
                + (
                    " Its final loss is easy to reach; --target=best or fewer "
                    "steps ask for more."
                    if name == BASELINE and target == "final"
                    else ""
                )
            )
    if BASELINE not in found:
        notes.append(
            f"Without the method {BASELINE} nothing is compared with it."
        )
    return notes


def _budgets(found: Mapping[str, Any], budget: str | None) -> list[str]:
    examples = {
        name: figures["figures"]["total_examples"]["mean"]
        for name, figures in found.items()
    }
    if len(set(examples.values())) < 2:
        return []
    shares = ", ".join(
        f"{name} {value:,.0f}" for name, value in examples.items()
    )
    remedy = (
        "Steps are shared out in whole executions between whole evaluations; "
        "a num_steps that has more divisors, or fewer evaluations, make it "
        "exact."
        if budget == "total"
        else "With --budget=total all get the same."
    )
    return [
        "The methods were given different numbers of training examples in "
        f"all: {shares}. {remedy}"
    ]


# Share of the versions that the interval asks for. Less is another interval.
_FEW_VERSIONS = 0.75


def _exchanges(found: Mapping[str, Any]) -> list[str]:
    """What of the exchange was not as it was set: it depends on the machine."""
    notes = []
    for name, method in found.items():
        figures = method["figures"]
        if "versions_due" not in figures:
            continue
        read, due = (
            figures[key]["mean"] for key in ("versions_read", "versions_due")
        )
        if read < _FEW_VERSIONS * due:
            notes.append(
                f"{name}: a group read {read:.1f} versions of its teachers, "
                f"where its exchange interval asks for {due:.0f}: its steps "
                "are faster than exports, or the machine is busy. With "
                "another speed it would come out differently; a larger "
                "exchange.every_steps, a smaller exchange.poll_secs, or "
                "longer steps help."
            )
        deaf = sum(figures["groups_without_teacher"]["values"])
        if deaf:
            notes.append(
                f"{name}: {deaf:.0f} group(s) of all trials never heard a "
                "teacher, and trained as if alone."
            )
    return notes


def _too_early(methods: Mapping[str, Trials], loss: float | None) -> list[str]:
    """Names the methods whose steps to the target nobody has counted."""
    found = [
        name
        for name, trials in methods.items()
        for curve in [trial.curve for trial in trials]
        if loss is not None and curve is not None and curve.values[0] <= loss
    ]
    if not found:
        return []
    return [
        "At the target by the first evaluation, and nobody knows how long "
        f"before: {', '.join(dict.fromkeys(found))}. Lower "
        "evaluate_every_steps, or take a lower --target."
    ]


def _went_on(methods: Mapping[str, Trials]) -> list[str]:
    found = [
        f"trial {trial.seed} of {name}"
        for name, trials in methods.items()
        for trial in trials
        if trial.went_on
    ]
    if not found:
        return []
    return [
        "Cut short once and gone on with from a backup, so that seconds and "
        f"bytes are of the last part alone: {', '.join(found)}."
    ]


def _examples_judged(methods: Mapping[str, Trials]) -> list[str]:
    """Names the methods that were not judged on the baseline's examples."""
    if BASELINE not in methods:
        return []
    labels = methods[BASELINE][0].predictions[0].labels
    others = [
        name
        for name, trials in methods.items()
        if not np.array_equal(trials[0].predictions[0].labels, labels)
    ]
    if not others:
        return []
    return [
        f"Judged on other validation examples than {BASELINE}, so that losses "
        f"cannot be compared: {', '.join(others)}."
    ]
