"""report.json: every figure, what may be said of it, and what to know.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.comparison import collect
from tfdistill.comparison import trials as trials_lib
from tfdistill.statistics import estimates

BASELINE, OWN_PAST = "independent", "own_past"
Trials = Sequence[collect.Finished]
_NAMES = {
    "codistill": "codistillation",
    "codistill_shared": "codistillation on shared data",
}
# Share of the versions that the interval asks for, of the answers about
# batches, or of the mixes. Less is another interval.
_FEW = 0.75
# A trial in which a group has a teacher in a smaller share of the steps after
# its burn-in is another trial than the rest.
_MOST_TAUGHT = 0.9


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
    if _curves(baseline) or target not in collect.NAMED:
        aim = collect.make(target, _curves(baseline))
    # Between all pairs of trials: the dearest figure, made once a method.
    churn = {
        name: collect.churn_matrices(trials) for name, trials in methods.items()
    }

    def versus(one: str, other: str, aim: collect.Target | None) -> Any:
        return {
            **_versus(methods[one], methods[other], aim),
            **_versus_churn(churn[one], churn[other]),
        }

    found: dict[str, dict[str, Any]] = {}
    for name, trials in methods.items():
        figures = found[name] = {
            "describe": descriptions[name],
            **_method(trials, churn[name], aim),
        }
        if baseline and name != BASELINE:
            figures["versus_independent"] = versus(name, BASELINE, aim)
            value = aim.value if aim else None
            figures["verdict"] = verdict_on(name, figures, target=value)
    # For two methods, the later minus the earlier. Differences to independent
    # stand with each method; values of a sweep are many, and left out.
    names = [n for n in methods if n != BASELINE and "[" not in n]
    names.sort(key=lambda name: name != OWN_PAST)
    given = dataclasses.replace(aim, kind="given") if aim else None
    pairs = [
        {"one": one, "other": other, **versus(one, other, given)}
        for place, one in enumerate(names)
        for other in names[:place]
    ]
    budget = context.get("setup", {}).get("budget")
    return {
        **context,
        "confidence": estimates.CONFIDENCE,
        "target": aim
        and {
            "metric": collect.curve_of(next(iter(found.values()))["figures"]),
            **vars(aim),
        },
        "notes": [
            *context.get("notes", ()),
            *_past_best(found, target),
            *_budgets(found, budget),
            *_of_trials(methods, aim),
            *(
                note
                for name, trials in methods.items()
                for note in _untaught(name, trials)
            ),
            *(
                note
                for name, method in found.items()
                for note in _exchange(name, method["figures"])
            ),
        ],
        "pairs": pairs,
        "conclusion": _conclusion(found),
        "beyond_own_past": _beyond_own_past(pairs, found, aim),
        "methods": found,
    }


def _curves(trials: Trials) -> list[collect.Curve]:
    return [trial.curve for trial in trials if trial.curve is not None]


# --- verdicts ---


def verdict_on(
    name: str, figures: Mapping[str, Any], *, target: float | None
) -> str:
    """Returns the verdict on a method, from its part of the report."""
    shown, versus = _shown(name), figures["versus_independent"]
    if few := _too_few(figures):
        return (
            f"{shown}: {few} are too few for a verdict; use "
            f"{trials_lib.LEAST_TRIALS} or more."
        )
    deaf = figures.get("figures", {}).get("groups_without_teacher")
    return (
        f"{shown} {_lead(versus).value}: "
        f"{_said(figures, versus, target, BASELINE)}"
        f"{_budget(versus)}"
        + (
            f"; {sum(deaf['values']):.0f} of its groups in all trials never "
            "had a teacher (see the notes)"
            if deaf and deaf["mean"]
            else ""
        )
    )


def _too_few(figures: Mapping[str, Any]) -> str:
    """Returns which trials are too few for a verdict; or ""."""
    for count, whose in (
        (figures["num_trials"], ""),
        (figures["versus_independent"]["num_trials"], f" of {BASELINE}"),
    ):
        if count < trials_lib.LEAST_TRIALS:
            return f"{count} trial(s){whose}"
    return ""


def _conclusion(found: Mapping[str, Any]) -> str:
    """Returns whether any method helps; empty with too few trials."""
    leads = {
        _shown(name): _lead(figures["versus_independent"])
        for name, figures in found.items()
        if "versus_independent" in figures and not _too_few(figures)
    }
    if better := [name for name, lead in leads.items() if lead is Lead.BETTER]:
        return f"Clearly better than {BASELINE}: {', '.join(better)}."
    return (
        f"No method is clearly better than {BASELINE}, your model as it is. "
        "More --trials narrow the intervals."
        if leads
        else ""
    )


class Lead(enum.Enum):
    """What the intervals of a method show in all, in words."""

    BETTER = "is better"
    WORSE = "is worse"
    MIXED = "is better in one figure and worse in another"
    UNCLEAR = "shows no clear difference"


def _lead(versus: Mapping[str, Any]) -> Lead:
    clear = set()
    for name, key, none in (
        ("churn", "ratio", 1),
        (collect.metric_in(versus), "difference", 0),
        ("steps_to_target", "ratio", 1),
    ):
        found = versus.get(name)
        if found and found["interval"] and found[key] is not None:
            low, high = found["interval"]
            if not low <= none <= high:
                clear.add(Lead.BETTER if high < none else Lead.WORSE)
    if len(clear) == 1:
        return clear.pop()
    return Lead.MIXED if clear else Lead.UNCLEAR


def _shown(name: str) -> str:
    plain = name if "[" in name else name.replace("_", " ")
    return _NAMES.get(name, plain)


def _said(
    figures: Mapping[str, Any],
    versus: Mapping[str, Any],
    target: float | None,
    other: str,
) -> str:
    parts = [
        _churn(versus.get("churn")),
        _loss(versus),
        _steps(figures, versus, target, other),
    ]
    return "; ".join(part for part in parts if part)


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
    versus: Mapping[str, Any],
    target: float | None,
    other: str,
) -> str:
    if target is None or "reached" not in figures:
        return ""
    goal = f"a loss of {target:.4g}"
    if collect.LOG_LOSS in versus:
        goal = f"{target:.4g} nats"
    found = versus.get("steps_to_target")
    reached, trials = figures["reached"], figures["num_trials"]
    if reached < trials:
        return f"reached {goal} in {reached} of {trials} trials"
    if found is None:
        return f"reached {goal}; {other} didn't in every trial"
    ratio = found["ratio"]
    if found["interval"] is None:
        return (
            f"reached {goal} ({ratio:.2f}x the steps, too close to the end of "
            "training for an interval)"
        )
    low, high = found["interval"]
    if low <= 1 <= high:
        return (
            f"steps to {goal} not clearly different "
            f"({ratio:.2f}x, {low:.2f} to {high:.2f})"
        )
    return f"reached {goal} in {ratio:.2f}x the steps ({low:.2f} to {high:.2f})"


def _churn(found: Mapping[str, Any] | None) -> str:
    if found is None or found["interval"] is None:
        return ""
    low, high = found["interval"]
    change = f"{found['ratio'] - 1:+.0%}"
    if low <= 1 <= high:
        return (
            f"churn not clearly different ({change}, {low - 1:+.0%} to "
            f"{high - 1:+.0%})"
        )
    # An end that is next to 0 must not be rounded to it.
    digits = 0 if min(abs(low - 1), abs(high - 1)) >= 0.005 else 1
    return f"churn {change} ({low - 1:+.{digits}%} to {high - 1:+.{digits}%})"


def _loss(versus: Mapping[str, Any]) -> str:
    metric = collect.metric_in(versus)
    found = versus[metric]
    if found["interval"] is None:
        return ""
    change, (low, high) = found["difference"], found["interval"]
    word = "better" if change < 0 else "worse"
    if low <= 0 <= high:
        word = "not clearly different"
    return (
        f"final {collect.METRICS[metric]} {word} ({change:+.4f}, {low:+.4f} to "
        f"{high:+.4f})"
    )


def _beyond_own_past(
    pairs: Sequence[Mapping[str, Any]],
    found: Mapping[str, Any],
    aim: collect.Target | None,
) -> list[str]:
    """Returns what other groups add to a student's own past version."""
    said = []
    for pair in pairs:
        one = found[pair["one"]]
        teaches = "between_groups_churn" in one["figures"]
        least = min(one["num_trials"], pair["num_trials"])
        enough = least >= trials_lib.LEAST_TRIALS
        if pair["other"] == OWN_PAST and aim and teaches and enough:
            text = _said(one, pair, aim.value, OWN_PAST)
            said.append(f"{_shown(pair['one'])} against {OWN_PAST}: {text}")
    return said


# --- notes ---


def _past_best(found: Mapping[str, Any], target: str) -> list[str]:
    notes = []
    for name, figures in found.items():
        values = figures["figures"]
        best = values.get(f"best_{collect.LOG_LOSS}")
        if not best:
            continue
        final = values[collect.LOG_LOSS]
        error = final["standard_error"] or 0.0
        if final["mean"] - best["mean"] > max(2 * error, 1e-3):
            notes.append(
                f"{name} overfits: its final log loss is {final['mean']:.4f}, "
                f"its best {best['mean']:.4f}."
                + (
                    " That makes its final loss easy to reach: use "
                    "--target=best or fewer steps."
                    if name == BASELINE and target == "final"
                    else ""
                )
            )
    if BASELINE not in found:
        notes.append(f"There are no verdicts without the method {BASELINE}.")
    return notes


def _budgets(found: Mapping[str, Any], budget: str | None) -> list[str]:
    examples = {
        name: figures["figures"]["total_examples"]["mean"]
        for name, figures in found.items()
    }
    # Verdicts and the table say it; here is what can be done about it.
    if len(set(examples.values())) < 2 or budget not in trials_lib.BUDGETS:
        return []
    shares = ", ".join(
        f"{name} {value:,.0f}" for name, value in examples.items()
    )
    remedies = {
        "total": " Steps are rounded to full executions and evaluations. To "
        "get equal numbers, choose a num_steps with more divisors, or "
        "evaluate less often.",
        "per_group": (
            " With --budget=total, all methods train on the same "
            "number of examples."
        ),
    }
    return [
        "The methods trained on different total numbers of examples: "
        f"{shares}.{remedies.get(str(budget), '')}"
    ]


def _of_trials(
    methods: Mapping[str, Trials], aim: collect.Target | None
) -> list[str]:
    """Names the methods, or trials, of which something is not as it seems."""

    def named(holds: Callable[[collect.Finished], bool]) -> str:
        return ", ".join(
            name for name, trials in methods.items() if any(map(holds, trials))
        )

    def is_early(trial: collect.Finished) -> bool:
        curve = trial.curve
        return bool(aim and curve and curve.values[0] <= aim.value)

    first = methods.get(BASELINE, next(iter(methods.values())))[0]
    others = named(
        lambda trial: (
            not np.array_equal(
                trial.predictions[0].labels, first.predictions[0].labels
            )
        )
    )
    resumed = ", ".join(
        f"trial {trial.seed} of {name}"
        for name, trials in methods.items()
        for trial in trials
        if trial.resumed
    )
    notes = {
        f"Evaluated on other validation examples than {BASELINE}, so losses "
        f"can't be compared: {others}.": BASELINE in methods and others,
        "Reached the target before the first evaluation, so the step is "
        f"unknown: {named(is_early)}. Lower evaluate_every_steps or "
        "--target.": named(is_early),
        "Interrupted and resumed from a backup, so seconds and bytes cover "
        f"only the last part: {resumed}.": resumed,
    }
    return [note for note, holds in notes.items() if holds]


def _exchange(name: str, figures: Mapping[str, Any]) -> list[str]:
    """What of the exchange was not as it was set: it depends on the machine."""

    def mean(key: str, default: float = 0.0) -> float:
        return figures.get(key, {"mean": default})["mean"]

    notes, speed = [], "The result depends on the machine's speed"
    done, left_out = mean("mixes"), mean("mixes_left_out")
    if done < _FEW * (done + left_out):
        notes.append(
            f"{name}: a group skipped {left_out:.1f} of {done + left_out:.0f} "
            "mixes, because too few of its peers published a version in time. "
            "A less busy machine helps."
        )
    if mean("answered", 1.0) < _FEW:
        notes.append(
            f"{name}: {mean('answered'):.0%} of the requests for predictions "
            "were answered in time: the groups' steps are too short, or the "
            f"machine is busy. {speed}; longer steps help, and for a workload "
            "a larger method.wait_secs."
        )
    if mean("versions_read") < _FEW * mean("versions_due"):
        notes.append(
            f"{name}: groups loaded {mean('versions_read'):.1f} of "
            f"{mean('versions_due'):.0f} scheduled versions of their teachers: "
            f"steps are faster than exports, or the machine is busy. {speed}; "
            "a larger every_steps or longer steps help."
        )
    return notes


def _untaught(name: str, trials: Trials) -> list[str]:
    """Returns a note on trials in which chance decided the time taught."""
    found = [(t.least_taught, t.seed) for t in trials if t.least_taught]
    few = [each for each, _ in found if each.share < _MOST_TAUGHT]
    if not few:
        return []
    least, seed = min(found)
    return [
        f"{name}: in {len(few)} of {len(found)} trials, a group had a teacher "
        f"in less than {_MOST_TAUGHT:.0%} of the steps after its burn-in. In "
        f"the one with the fewest, group {least.group} of trial {seed}, it was "
        f"{least.share:.0%}: {least.why}"
    ]


# --- figures ---


def _method(
    trials: Trials,
    churn: Mapping[str, np.ndarray],
    aim: collect.Target | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_trials": len(trials),
        "figures": {
            # A short trial may have heard no teacher, and have no staleness.
            name: estimates.over_trials(
                [t.figures[name] for t in trials if name in t.figures]
            )
            for name in {n: None for t in trials for n in t.figures}
        },
        "churn": {
            name: estimates.over_pairs(matrix) for name, matrix in churn.items()
        },
        "spread": collect.spread(trials),
        "trials": [_trial(trial) for trial in trials],
    }
    if aim and _curves(trials):
        found |= _to_target(trials, aim.value)
    return found


def _trial(trial: collect.Finished) -> dict[str, Any]:
    curve = trial.curve
    return {
        "seed": trial.seed,
        "runs": trial.directories,
        "copies": trial.copies,
        "figures": trial.figures,
        "curve": curve
        and {
            "steps": curve.steps,
            collect.curve_of(trial.figures): [
                value if math.isfinite(value) else None
                for value in curve.values
            ],
            "seconds": curve.seconds,
        },
    }


def _to_target(trials: Trials, loss: float) -> dict[str, Any]:
    reached = []
    for trial in trials:
        place = trial.curve and trial.curve.reaches(loss)
        if place:
            (step, seconds), figures = place, trial.figures
            # A teacher had to be trained before, on all of its examples.
            before = figures["total_examples"] - figures["student_examples"]
            examples = before + _examples_per_step(trial) * step
            seconds += figures["teacher_seconds"]
            reached.append((step, examples, seconds))
    found: dict[str, Any] = {"reached": len(reached)}
    names = ("steps_to_target", "examples_to_target", "seconds_to_target")
    for name, values in zip(names, zip(*reached, strict=True), strict=False):
        found[name] = estimates.over_trials(values)
    return found


def _examples_per_step(trial: collect.Finished) -> float:
    return trial.figures["student_examples"] / trial.curve.steps[-1]  # type: ignore[union-attr]


def _versus(
    trials: Trials, baseline: Trials, aim: collect.Target | None
) -> dict[str, Any]:
    def ratio(figure: Callable[[collect.Finished], float]) -> float:
        ours, theirs = (
            np.mean([figure(trial) for trial in side])
            for side in (trials, baseline)
        )
        return float(ours / theirs)

    found: dict[str, Any] = {
        "num_trials": len(baseline),
        "examples": ratio(lambda trial: trial.figures["total_examples"]),
    }
    for name in (*collect.METRICS, f"best_{collect.LOG_LOSS}"):
        if all(name in t.figures for t in (*trials, *baseline)):
            value, interval = estimates.difference(
                [trial.figures[name] for trial in trials],
                [trial.figures[name] for trial in baseline],
            )
            found[name] = {"difference": value, "interval": interval}
    curves, others = _curves(trials), _curves(baseline)
    if not curves or not others:
        return found
    found["examples_per_step"] = ratio(_examples_per_step)
    steps = aim and collect.compare_steps(aim, curves, others)
    if steps:
        found["steps_to_target"] = {"ratio": steps[0], "interval": steps[1]}
    return found


def _versus_churn(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in filter(theirs.__contains__, ours):
        value, interval = estimates.ratio_of_pairs(ours[name], theirs[name])
        # Where retrains of independent agree, there is no multiple of that.
        found[name] = {
            "ratio": value if math.isfinite(value) else None,
            "interval": interval,
        }
    return found
