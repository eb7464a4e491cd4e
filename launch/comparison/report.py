"""report.json: every figure, what may be said of it, and what to know.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.comparison import bootstrap
from launch.comparison import collect
from launch.comparison import trials as trials_lib

_NAMES = {
    "codistill": "codistillation",
    "codistill_shared": "codistillation on shared data",
}


def verdict_on(name: str, figures: Mapping[str, Any], *, target: float) -> str:
    """Returns the verdict on a method, from its part of the report."""
    shown = _shown(name)
    versus = figures["versus_independent"]
    least = trials_lib.LEAST_TRIALS
    for count, whose in (
        (figures["num_trials"], ""),
        (versus["num_trials"], " of independent"),
    ):
        if count < least:
            return (
                f"{shown}: {count} trial(s){whose} are too few "
                f"to say anything; take {least} or more."
            )
    said = _said(figures, versus, target, BASELINE)
    return f"{shown} {said}{_budget(versus)}{_deaf(figures)}"


def _shown(name: str) -> str:
    plain = name if "[" in name else name.replace("_", " ")
    return _NAMES.get(name, plain)


def _said(
    figures: Mapping[str, Any],
    versus: Mapping[str, Any],
    target: float,
    other: str,
) -> str:
    parts = [
        _steps(figures, versus.get("steps_to_target"), target, other),
        _churn(versus.get("churn")),
        _loss(versus[collect.METRIC]),
    ]
    return "; ".join(part for part in parts if part)


def _deaf(figures: Mapping[str, Any]) -> str:
    found = figures.get("figures", {}).get("groups_without_teacher")
    if not found or not found["mean"]:
        return ""
    return "; some of its groups never had a teacher, see the notes"


def _budget(versus: Mapping[str, Any]) -> str:
    """The examples in all, and at each step, if independent took fewer."""
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
    figures: Mapping[str, Any],
    found: Mapping[str, Any] | None,
    target: float,
    other: str,
) -> str:
    if "reached" not in figures:
        return ""
    reached, trials = figures["reached"], figures["num_trials"]
    if reached < trials:
        return f"reached {target:.4g} nats in {reached} of {trials} trials"
    if found is None:
        return f"reached {target:.4g} nats; {other} did not in all trials"
    if found["interval"] is None:
        return (
            f"reached {target:.4g} nats ({found['ratio']:.2f}x the steps, too "
            "near to the end of its trials for an interval)"
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


BASELINE, OWN_PAST = "independent", "own_past"
Trials = Sequence[collect.Finished]


def notes_on(
    methods: Mapping[str, Trials],
    found: Mapping[str, Any],
    *,
    target: str,
    loss: float | None,
    budget: str | None,
) -> list[str]:
    """Returns the notes on all methods, each a sentence or more."""
    return [
        *_past_best(found, target),
        *_budgets(found, budget),
        *_examples_judged(methods),
        *_too_early(methods, loss),
        *_resumed(methods),
        *_exchanges(found),
    ]


def _past_best(found: Mapping[str, Any], target: str) -> list[str]:
    notes = []
    for name, figures in found.items():
        values = figures["figures"]
        best = values.get(f"best_{collect.METRIC}")
        final = values[collect.METRIC]
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


# Share of the versions that the interval asks for, or of the answers about
# batches. Less is another interval.
_FEW_VERSIONS = 0.75


def _exchanges(found: Mapping[str, Any]) -> list[str]:
    """What of the exchange was not as it was set: it depends on the machine."""
    notes = []
    for name, method in found.items():
        figures = method["figures"]
        if "mixes" in figures:
            notes += _mixes(name, figures)
        if "groups_without_teacher" not in figures:
            continue
        answered = figures.get("answered", {"mean": 1.0})["mean"]
        if answered < _FEW_VERSIONS:
            notes.append(
                f"{name}: {answered:.0%} of the questions about batches were "
                "answered in time: the groups' steps are too fast for their "
                "answers, or the machine is busy. With another speed it would "
                "come out differently; a larger method.wait_secs helps "
                "groups that send predictions, longer steps help all."
            )
        read, due = (
            figures.get(key, {"mean": 0.0})["mean"]
            for key in ("versions_read", "versions_due")
        )
        if read < _FEW_VERSIONS * due:
            notes.append(
                f"{name}: a group read {read:.1f} versions of its teachers, "
                f"but its exchange interval asks for {due:.0f}: its steps "
                "are faster than exports, or the machine is busy. With "
                "another speed it would come out differently; a larger "
                "every_steps or longer steps help."
            )
        deaf = sum(figures["groups_without_teacher"]["values"])
        if deaf:
            notes.append(
                f"{name}: {deaf:.0f} group(s) of all trials never had a "
                "teacher, and trained without one."
            )
    return notes


def _mixes(name: str, figures: Mapping[str, Any]) -> list[str]:
    done, left_out = (
        figures[key]["mean"] for key in ("mixes", "mixes_left_out")
    )
    if done >= _FEW_VERSIONS * (done + left_out):
        return []
    return [
        f"{name}: a group left out {left_out:.1f} of {done + left_out:.0f} "
        "mixes, because too few of its peers had a version in time. On a less "
        "busy machine they would be there."
    ]


def _too_early(methods: Mapping[str, Trials], loss: float | None) -> list[str]:
    """Names the methods whose steps to the target are unknown."""
    found = [
        name
        for name, trials in methods.items()
        for curve in [trial.curve for trial in trials]
        if loss is not None and curve is not None and curve.values[0] <= loss
    ]
    if not found:
        return []
    return [
        "At the target by the first evaluation, and it is unknown how long "
        f"before: {', '.join(dict.fromkeys(found))}. Lower "
        "evaluate_every_steps, or take a lower --target."
    ]


def _resumed(methods: Mapping[str, Trials]) -> list[str]:
    found = [
        f"trial {trial.seed} of {name}"
        for name, trials in methods.items()
        for trial in trials
        if trial.resumed
    ]
    if not found:
        return []
    return [
        "Interrupted once and resumed from a backup, so that seconds and bytes "
        f"are of the last part only: {', '.join(found)}."
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


def make(
    methods: Mapping[str, Trials],
    *,
    target: str,
    descriptions: Mapping[str, str],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the complete report, for JSON.

    Each method has one finished trial or more; `context` is what else the
    report says, such as the configuration.
    """
    baseline = methods.get(BASELINE, ())
    aim = None
    if baseline or target not in collect.NAMED:
        aim = collect.make(target, _curves(baseline))
    # Between all pairs of trials: the dearest figure, made once a method.
    churn = {
        name: collect.churn_matrices(trials) for name, trials in methods.items()
    }
    found = _figures(methods, churn, descriptions, aim)
    pairs = _pairs(methods, churn, aim)
    return {
        **context,
        "confidence": bootstrap.CONFIDENCE,
        "target": aim.to_tree() if aim else None,
        "notes": [
            *context.get("notes", ()),
            *notes_on(
                methods,
                found,
                target=target,
                loss=aim.value if aim else None,
                budget=context.get("setup", {}).get("budget"),
            ),
        ],
        "pairs": pairs,
        "beyond_own_past": _beyond_own_past(pairs, found, aim),
        "methods": found,
    }


def _pairs(
    methods: Mapping[str, Trials],
    churn: Mapping[str, Mapping[str, np.ndarray]],
    aim: collect.Target | None,
) -> list[dict[str, Any]]:
    """Returns the differences between methods, the later less the earlier.

    Those to independent stand with each method; values of a sweep are many,
    and left out.
    """
    names = [n for n in methods if n != BASELINE and "[" not in n]
    names.sort(key=lambda name: name != OWN_PAST)
    given = dataclasses.replace(aim, kind="given") if aim else None
    return [
        {
            "one": one,
            "other": other,
            **_versus(methods[one], methods[other], given),
            **_versus_churn(churn[one], churn[other]),
        }
        for place, one in enumerate(names)
        for other in names[:place]
    ]


def _beyond_own_past(
    pairs: Sequence[Mapping[str, Any]],
    found: Mapping[str, Any],
    aim: collect.Target | None,
) -> list[str]:
    """Says what other groups add to a version of one's own past."""
    said = []
    for pair in pairs:
        name, trials = pair["one"], found[pair["one"]]["num_trials"]
        teaches = "between_groups_churn" in found[name]["figures"]
        enough = min(trials, pair["num_trials"]) >= trials_lib.LEAST_TRIALS
        if pair["other"] == OWN_PAST and aim and teaches and enough:
            text = _said(found[name], pair, aim.value, OWN_PAST)
            said.append(f"{_shown(name)} against {OWN_PAST}: {text}")
    return said


def _figures(
    methods: Mapping[str, Trials],
    churn: Mapping[str, Mapping[str, np.ndarray]],
    descriptions: Mapping[str, str],
    aim: collect.Target | None,
) -> dict[str, dict[str, Any]]:
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
                figures["verdict"] = verdict_on(name, figures, target=aim.value)
        found[name] = figures
    return found


def _method(
    trials: Trials,
    churn: Mapping[str, np.ndarray],
    aim: collect.Target | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_trials": len(trials),
        "figures": {
            # A short trial may have heard no teacher, and have no staleness.
            name: bootstrap.over_trials(
                [t.figures[name] for t in trials if name in t.figures]
            ).to_tree()
            for name in {n: None for t in trials for n in t.figures}
        },
        "churn": {
            name: bootstrap.over_pairs(matrix).to_tree()
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
            collect.METRIC: [
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
            name: bootstrap.over_trials(values).to_tree()
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
    trials: Trials, baseline: Trials, aim: collect.Target | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_trials": len(baseline),
        "examples": float(
            np.mean([t.figures["total_examples"] for t in trials])
            / np.mean([t.figures["total_examples"] for t in baseline])
        ),
    }
    for name in (collect.METRIC, f"best_{collect.METRIC}"):
        if all(name in t.figures for t in (*trials, *baseline)):
            value, interval = bootstrap.difference(
                [trial.figures[name] for trial in trials],
                [trial.figures[name] for trial in baseline],
            )
            found[name] = {"difference": value, "interval": interval}
    curves, others = _curves(trials), _curves(baseline)
    if curves and others:
        ours_per_step, theirs_per_step = (
            np.mean([_examples_per_step(trial) for trial in side])
            for side in (trials, baseline)
        )
        found["examples_per_step"] = float(ours_per_step / theirs_per_step)
    if aim and curves and others:
        steps = collect.compare_steps(aim, curves, others)
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
        value, interval = bootstrap.ratio_of_pairs(ours[name], theirs[name])
        # Where retrains of independent agree, there is no multiple of that.
        found[name] = {
            "ratio": value if math.isfinite(value) else None,
            "interval": interval,
        }
    return found


def _curves(trials: Trials) -> list[collect.Curve]:
    return [trial.curve for trial in trials if trial.curve is not None]
