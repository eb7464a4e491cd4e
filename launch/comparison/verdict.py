"""What may be said of a method in one line: never more than its intervals.

Imports neither TensorFlow nor Keras.
"""

from collections.abc import Mapping
from typing import Any

from launch.comparison import curves
from launch.comparison import statistics

_NAMES = {
    "codistill": "codistillation",
    "codistill_shared": "codistillation on shared data",
}


def of(name: str, figures: Mapping[str, Any], *, target: float) -> str:
    """Returns the verdict on a method, compared with `independent`.

    Args:
        name: Of the method.
        figures: Its part of the report.
        target: Validation log loss that steps are counted to.
    """
    plain = name if "[" in name else name.replace("_", " ")
    shown = _NAMES.get(name, plain)
    versus = figures["versus_independent"]
    least = statistics.LEAST_TRIALS
    for count, whose in (
        (figures["num_trials"], ""),
        (versus["num_trials"], " of independent"),
    ):
        if count < least:
            return (
                f"{shown}: {count} trial(s){whose} are too few "
                f"to say anything; take {least} or more."
            )
    parts = [
        _steps(figures, versus.get("steps_to_target"), target),
        _churn(versus.get("churn")),
        _loss(versus[curves.METRIC]),
    ]
    said = "; ".join(part for part in parts if part)
    return f"{shown} {said}{_budget(versus)}{_deaf(figures)}"


def _deaf(figures: Mapping[str, Any]) -> str:
    found = figures.get("figures", {}).get("groups_without_teacher")
    if not found or not found["mean"]:
        return ""
    return "; some of its groups never heard a teacher, see the notes"


def _budget(versus: Mapping[str, Any]) -> str:
    """What it took in all, and at each step, where independent took less."""
    examples = versus["examples"]
    parts = []
    if abs(examples - 1) >= 0.005:
        parts.append(f"on {examples:.3g}x the training examples in all")
    # With as many steps as independent the first part says it.
    per_step = versus.get("examples_per_step", examples)
    if abs(per_step - 1) >= 0.005 and abs(per_step / examples - 1) >= 0.005:
        parts.append(f"{per_step:.3g}x the training examples at each step")
    return f" ({'; '.join(parts)})" if parts else ""


def _steps(
    figures: Mapping[str, Any], found: Mapping[str, Any] | None, target: float
) -> str:
    if "reached" not in figures:
        return ""
    reached, trials = figures["reached"], figures["num_trials"]
    if reached < trials:
        return f"reached {target:.4g} nats in {reached} of {trials} trials"
    if found is None:
        return f"reached {target:.4g} nats; independent did not in all trials"
    if found["interval"] is None:
        return (
            f"reached {target:.4g} nats ({found['ratio']:.2f}x the steps, too "
            "near to where its trials ended for an interval)"
        )
    value, (low, high) = found["ratio"], found["interval"]
    steps = f"{value:.2f}x the steps"
    if low <= 1 <= high:
        return (
            f"shows no clear difference in steps to {target:.4g} nats "
            f"({value:.2f}x, {low:.2f} to {high:.2f})"
        )
    return f"reached {target:.4g} nats in {steps} ({low:.2f} to {high:.2f})"


def _churn(found: Mapping[str, Any] | None) -> str:
    if found is None or found["interval"] is None:
        return ""
    change, (low, high) = _percent(found["ratio"]), found["interval"]
    if low <= 1 <= high:
        return (
            f"churn not clearly different ({change:+.0f}%, "
            f"{_percent(low):+.0f}% to {_percent(high):+.0f}%)"
        )
    # The farther end: what is said must not end before the interval does.
    half = max(high - found["ratio"], found["ratio"] - low) * 100
    return f"churn {change:+.0f}% +- {half:.0f}"


def _loss(found: Mapping[str, Any]) -> str:
    change = found["difference"]
    if found["interval"] is None:
        return ""
    low, high = found["interval"]
    if low <= 0 <= high:
        return (
            f"final log loss not clearly different ({change:+.4f}, "
            f"{low:+.4f} to {high:+.4f})"
        )
    word = "better" if change < 0 else "worse"
    return f"final log loss {word} ({change:+.4f}, {low:+.4f} to {high:+.4f})"


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)
