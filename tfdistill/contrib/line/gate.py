"""May a candidate replace the promoted version? Limits, and a verdict.

Reads files, and imports neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import numpy as np

from tfdistill import metrics
from tfdistill.contrib.line import data_check
from tfdistill.contrib.line import figures
from tfdistill.contrib.line import report as report_lib
from tfdistill.contrib.line import weight_check
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.statistics import estimates as estimates_lib
from tfdistill.system import run_files

if TYPE_CHECKING:
    from tfdistill.contrib.line import store

# In a candidate's directory: its run, what the promoted version predicts of the
# held-out rows, which of them are judged by themselves, and the controls.
RUN, TESTED = "run", "promoted"
SLICES, CONTROLS = "slices.npz", "controls.json"
_NORMAL = statistics.NormalDist()
PROMOTE, HOLD, ROLL_BACK = "promote", "hold", "roll back"
# The verdict on a first version that should be rolled back.
WORSE = "worse"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """When a candidate is promoted, and when a promoted version is rolled back.

    The candidate's log loss must be shown to be within its limit: if the
    held-out rows are too few for that, it is held. All other limits hold it
    only if they are surely exceeded: the whole interval lies beyond. None
    switches a limit off. The guide has the error rates of the defaults, "What
    the gate can and cannot promise".

    Attributes:
        confidence: Confidence of all intervals, two-sided. Default 0.95.
        log_loss: How much the candidate's log loss may exceed the promoted
            version's, in nats, by the upper end of its interval. Default
            0.005: of 1,600 held-out clicks, a retrain's interval reaches
            0.004 further than its estimate at most.
        slice_log_loss: The same for each slice, by the lower end; with the
            given confidence no slice is beyond its interval. Default 0.002.
        auc: How much the AUC may fall, by the lower end. Default 0.005.
        calibration: The largest shift of all logits that would correct the mean
            prediction; more only if the promoted version needs such a shift,
            too, and the candidate needs less. By the lower end, for binary
            models. Default 0.06, or 6% of the odds.
        churn: The mean change of a prediction, by the lower end. Default 0.1.
        net_flips: The share of rows that the promoted version had right and the
            candidate has wrong, minus the reverse share, by the lower end.
            Default 0.01.
        least_slice_rows: A smaller slice is not judged. Default 100.
        least_rows: Rows of the new span as a share of the earlier spans'
            median. Default 0.7.
        drift: How far a column may move from one span to the next: about the
            share of its rows that change their value. Half more than before
            is always allowed. Default 0.35.
        label_drift: The same for the share of positive labels by value, apart
            from a shift of all shares: in standard deviations of the label.
            Default 0.12.
        false_alarms: The chance, at most, that good training rows are found to
            differ from good held-out rows. Default 0.03.
        ignored_columns: Not compared, such as an hour if the last hours of a
            span are held out. Names as in the report: `"numbers[2]"`.
        canary_examples: Live examples after which a version has passed.
            Default 10,000.
        live_log_loss: How much the live log loss may exceed the previous
            version's in the same period, by the lower end, in nats. Default
            0.01.
        live_drift: The same limit against the held-out loss at the promotion,
            when the previous version isn't reported: other days differ. Default
            0.05.
        checks: Functions of a `Context`, each of which returns None, or a
            sentence why the candidate is held. Default: the look at its data,
            and at its weights. To add one: `checks=[*Gate().checks, mine]`.
    """

    confidence: float = 0.95
    log_loss: float = 0.005
    slice_log_loss: float | None = 0.002
    auc: float | None = 0.005
    calibration: float | None = 0.06
    churn: float | None = 0.1
    net_flips: float | None = 0.01
    least_slice_rows: int = 100
    least_rows: float = 0.7
    drift: float = 0.35
    label_drift: float = 0.12
    false_alarms: float = 0.03
    ignored_columns: Sequence[str] = ()
    canary_examples: int = 10_000
    live_log_loss: float = 0.01
    live_drift: float = 0.05
    checks: Sequence[Callable[["Context"], str | None]] = (
        data_check.check,
        weight_check.check,
    )

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("confidence", "false_alarms"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be between 0 and 1; received "
                    f"{getattr(self, name)}."
                )

    def settings(self) -> dict[str, Any]:
        """Returns its fields, for JSON: functions by their names."""
        fields = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
        }
        names = [f"{c.__module__}.{c.__qualname__}" for c in self.checks]
        return {**fields, "checks": names}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Gate":
        """Returns the gate of these settings, with the default checks."""
        return cls(**{k: v for k, v in settings.items() if k != "checks"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a check gets: a candidate, and what it is to replace.

    Attributes:
        gate: The gate, with its limits.
        candidate: For each retrain, predictions of the held-out rows: `labels`,
            and probabilities as `compared`.
        promoted: The promoted version's; None if there is none.
        slices: By name: which rows are in it, bool `[rows]`.
        figures: By name, of all rows: of the "candidate" and the "promoted".
        lineage: Where the candidate comes from: its `span`, `metrics`,
            `examples`, and summaries of its `data` and `weights`.
        earlier: Lineages of the versions promoted before, the oldest first.
    """

    gate: Gate
    candidate: Sequence[Any] = ()
    promoted: Any = None
    slices: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lineage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    earlier: Sequence[Mapping[str, Any]] = ()


def verdict(
    gate: Gate,
    *,
    candidate: Sequence[Any],
    promoted: Any = None,
    slices: Mapping[str, np.ndarray] | None = None,
    lineage: Mapping[str, Any] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the report on a candidate, for JSON.

    `candidate` has one of `held_out.predictions` for each retrain, `promoted`
    is the promoted version's, for the same rows. If there is none, the
    candidate has to be better than the share of each label. Slices are bool
    `[rows]`. Lineages are what the gate's checks compare; see `Context`.
    """
    masks = {k: np.asarray(rows, bool) for k, rows in (slices or {}).items()}
    before, models = _models(candidate, promoted)
    labels = models[0].labels
    for name, rows in masks.items():
        if rows.shape != labels.shape:
            raise ValueError(
                f"A slice must have one bool for each of the {len(labels)} "
                f"held-out rows; received shape {rows.shape} of {name!r}."
            )

    def of_both(rows: Any) -> dict[str, Any]:
        return {
            "candidate": predictions.means([m.figures(rows) for m in models]),
            "promoted": before.figures(rows) if before else None,
        }

    judged = {
        k: r for k, r in masks.items() if r.sum() >= gate.least_slice_rows
    }
    estimates = figures.estimates(
        models, before, judged, confidence=gate.confidence
    )
    data = (lineage or {}).get("data", {})
    overall, lacked = of_both(np.s_[:]), 0.0
    if before and "offset" in estimates:
        estimates["offset"], lacked = _offsets(
            estimates["offset"],
            overall["promoted"]["offset"],
            data,
            gate.confidence,
        )
    losses = np.mean([one.means["log_loss"] for one in models], axis=0)
    failed = [] if before else _unskilled(labels, float(losses.mean()))
    failed += [
        why
        for limit in _limits(gate, estimates, lacked)
        if limit.name in estimates
        and (why := limit.fault(estimates[limit.name]))
    ]
    context = Context(
        gate=gate,
        candidate=candidate,
        promoted=promoted,
        slices=masks,
        figures=overall,
        lineage=lineage or {},
        earlier=earlier,
    )
    failed += [why for check in gate.checks if (why := check(context))]
    return {
        "verdict": HOLD if failed else PROMOTE,
        "reasons": failed or [_passed(estimates, len(judged), data)],
        "rows": len(labels),
        "retrains": len(models),
        "figures": overall,
        "estimates": {
            k: v
            for k, v in estimates.items()
            if not k.startswith(figures.SLICE)
        },
        "slices": {
            name: {
                "rows": int(rows.sum()),
                "log_loss": estimates.get(figures.SLICE + name),
                "figures": of_both(rows),
            }
            for name, rows in masks.items()
            if rows.any()
        },
        "curves": {
            name: metrics.calibration_curve(labels, model.compared)
            for name, model in (("candidate", models[0]), ("promoted", before))
            if model and model.is_binary
        },
        "expected": {
            "log_loss": float(losses.mean()),
            "standard_deviation": float(losses.std()),
            "examples": len(losses),
        },
        "gate": gate.settings(),
    }


def _models(
    candidate: Sequence[Any], promoted: Any
) -> tuple[figures.Model | None, list[figures.Model]]:
    """Returns what the promoted version and the candidate have predicted."""
    labels = np.asarray(candidate[0].labels)
    for other in (*candidate, *([] if promoted is None else [promoted])):
        if not np.array_equal(other.labels, labels):
            raise ValueError(
                "A candidate and the promoted version must have predicted the "
                f"same rows in the same order; received {len(labels)} and "
                f"{len(other.labels)} rows, or different labels. Retrain the "
                "candidate."
            )
    before = None if promoted is None else figures.Model(promoted)
    return before, [figures.Model(one, before) for one in candidate]


def _offsets(
    found: Mapping[str, Any],
    lacked: float,
    data: Mapping[str, Any],
    confidence: float,
) -> tuple[Mapping[str, Any], float]:
    """Returns the candidate's offset and the promoted version's.

    The promoted version has not seen the rows that the candidate was trained
    on. Its offset there makes both more precise: on the held-out rows they
    share the noise of the labels, and differ by a change.
    """
    known = [
        data[part]["calibration"]
        for part in ("training", "held_out")
        if "calibration" in data.get(part, {})
    ]
    if len(known) < 2:
        return found, lacked
    change = found["value"] - lacked
    lacked, error = estimates_lib.pooled(known)
    value = lacked + change
    reach = -error * _NORMAL.inv_cdf(0.5 - confidence / 2)
    return {"value": value, "interval": [value - reach, value + reach]}, lacked


class Limit(NamedTuple):
    """How far the interval of an estimate may reach.

    Its low end may not exceed the limit, so that the estimate is only held if
    it is surely beyond; or its high end, which must be shown to pass.

    Attributes:
        name: The estimate's name.
        what: The estimate in words.
        most: The limit; None for none.
        end: "low" or "high".
        sign: -1 for an estimate that may not fall so far.
    """

    name: str
    what: str
    most: float | None
    end: str = "low"
    sign: int = 1

    def fault(self, found: Mapping[str, Any]) -> str | None:
        """Returns a sentence on an estimate that is beyond the limit."""
        if self.most is None:
            return None
        low, high = sorted(self.sign * end for end in found["interval"])
        if (high if self.end == "high" else low) <= self.most:
            return None
        unsure = ", and the held-out rows are too few to tell"
        return (
            f"{self.what} {report_lib.estimate(found)}; the limit is "
            f"{self.sign * self.most:+.4f}{unsure * (low <= self.most)}."
        )


def _limits(
    gate: Gate, estimates: Mapping[str, Any], lacked: float
) -> list[Limit]:
    """Returns the limits of the gate, of all slices, too."""
    moved = "The mean prediction of a row has changed by"
    limits = [
        Limit("log_loss", "The log loss has changed by", gate.log_loss, "high"),
        Limit("auc", "The AUC has changed by", gate.auc, sign=-1),
        Limit("churn", moved, gate.churn),
        Limit("net_flips", "The error rate has changed by", gate.net_flips),
    ]
    for name in estimates:
        if name.startswith(figures.SLICE):
            what = f"In {name} the log loss has changed by"
            limits.append(Limit(name, what, gate.slice_log_loss))
    if gate.calibration is not None:
        beside = f" (promoted version: {lacked:+.4f})" if lacked else ""
        what = f"The mean prediction needs a shift of all logits{beside} of"
        most, least = max(lacked, 0), min(lacked, 0)
        limits += [
            Limit("offset", what, gate.calibration + most),
            Limit("offset", what, gate.calibration - least, sign=-1),
        ]
    return limits


def _unskilled(labels: np.ndarray, loss: float) -> list[str]:
    """Returns why the first version of a line isn't good enough."""
    _, counts = np.unique(labels, return_counts=True)
    shares = counts / counts.sum()
    base = -float((shares * np.log(shares)).sum())
    if loss < base:
        return []
    return [
        f"The log loss is {loss:.4f}; always predicting the share of each "
        f"label has {base:.4f}."
    ]


def _passed(
    estimates: Mapping[str, Any], num_slices: int, data: Mapping[str, Any]
) -> str:
    rows = (
        "its training rows resemble the held-out rows and the earlier spans"
        if "training" in data
        else "its rows weren't compared, because its lineage has no summary"
    )
    loss = estimates.get("log_loss")
    if loss is None:
        return f"The first version beats the base rate, and {rows}."
    return (
        f"The log loss has changed by {report_lib.estimate(loss)}, predictions "
        f"by {estimates['churn']['value']:.4f}"
        + f"; none of {num_slices} slices is surely worse" * (num_slices > 0)
        + f", and {rows}."
    )


def judge(line: "store.Line", number: int) -> dict[str, Any]:
    """Returns the report on a trained candidate, and writes it beside it.

    The gate comes from the workload that the candidate was trained with.
    """
    path = pathlib.Path(line.candidate_path(number))
    lineage = line.lineage(number)
    groups = sorted((path / RUN).glob(run_files.group_name(0)[:-1] + "*"))
    if not groups:
        raise ValueError(
            f"{path} must have the run of candidate {number}; it was removed, "
            "or is on another machine. Judge the candidate there, or retrain."
        )
    promoted = path / TESTED
    slices = {}
    if (path / SLICES).exists():
        with np.load(path / SLICES) as arrays:
            slices = dict(arrays)
    kept, earlier = line.history(), []
    for one in kept:
        with contextlib.suppress(ValueError):  # Old ones may be removed.
            earlier += [line.lineage(one)] if one < number else []
    report = verdict(
        _gate(path, lineage),
        candidate=[predictions.read(group) for group in groups],
        promoted=predictions.read(promoted) if promoted.exists() else None,
        slices=slices,
        lineage=lineage,
        earlier=earlier,
    )
    report |= {"number": number, "parent": lineage.get("parent")}
    if (path / CONTROLS).exists():
        report["controls"] = json.loads((path / CONTROLS).read_bytes())
    late = line.journal.too_late(number) if number != line.promoted() else ""
    if late:
        report["verdict"] = HOLD
        report["reasons"].insert(0, late)
    past = [
        {"number": event["number"], **event.get("figures", {})}
        for event in line.journal.events("judge")
        if event["number"] < number
    ]
    own = {"number": number, **report["figures"]["candidate"]}
    report_lib.write(path, report, [*past, own])
    return report


def _gate(path: pathlib.Path, lineage: Mapping[str, Any]) -> Gate:
    """Returns a candidate's gate; its workload has added functions."""
    settings = lineage.get("gate", {})
    gate = Gate.of(settings)
    if settings.get("checks") in (None, gate.settings()["checks"]):
        return gate
    recipe = recipes.read(path / RUN / outputs.CONFIG)
    own = dataclasses.replace(recipe, method=None, method_arguments={})
    line = own.workload().line
    if not line or not line.gate:
        raise ValueError(
            f"The workload {recipe.recipe} must have the gate that candidate "
            f"{path} was trained with: {', '.join(settings['checks'])}."
        )
    return dataclasses.replace(gate, checks=line.gate.checks)


def live_verdict(
    line: "store.Line", *, more: Sequence[dict[str, Any]] = ()
) -> tuple[str, list[str]]:
    """Returns whether the promoted version stays, by its live log loss.

    Args:
        line: The line, whose `report` events have the number of a version, its
            live `log_loss` and how many `examples` that is the mean of.
        more: Reports that are not noted in the line.

    Returns:
        "promote" if it stays, "hold" while its canary period lasts, "roll
        back", or "worse" if no version was promoted before it; and the reasons,
        a sentence each.
    """
    pointer = line.journal.pointer()
    served, previous = pointer.get("version"), pointer.get("previous")
    if served is None:
        return HOLD, ["No version is promoted."]
    gate = Gate.of(line.lineage(served).get("gate", {}))
    since = [
        e
        for e in line.journal.events("report")
        if e["event"] > pointer["event"]
    ]
    since += more
    loss, size, looks = _live(since, served)
    if not size:
        return HOLD, [
            f"No live loss of version {served} has been reported yet."
        ]
    judged = [e for e in line.journal.events("judge") if e["number"] == served]
    expected = judged[-1].get("expected") if judged else None
    # Per row; without a judgement, as wide as a loss of this size may be.
    deviation = expected["standard_deviation"] if expected else max(loss, 1.0)
    base, rows, _ = _live(since, previous)
    if rows:
        limit = gate.live_log_loss
        what = f"version {previous}'s loss in the same period"
    elif expected:
        base, rows = expected["log_loss"], expected["examples"]
        limit, what = gate.live_drift, "the loss on its held-out rows"
    else:
        return HOLD, [
            f"Version {served} has a live log loss of {loss:.4f}, and there is "
            "nothing to compare it with: judge the version, or report the "
            "previous version's live loss, too."
        ]
    # One-sided. The k-th report errs with 1 / (k (k + 1)) of what may be, so
    # that all of them together err no more often.
    level = (1 - gate.confidence) / (looks * (looks + 1))
    reach = -_NORMAL.inv_cdf(level) * deviation
    reach *= math.sqrt(1 / size + 1 / rows)
    said = (
        f"Version {served} has a live log loss of {loss:.4f} on {size:,} "
        f"examples, {loss - base:+.4f} (at least {loss - base - reach:+.4f}) "
        f"from {what} ({base:.4f}); the limit is {limit:+.4f}."
    )
    if not loss - base - reach <= limit:
        if previous is None:
            return WORSE, [
                said,
                "No version was promoted before it, so nothing is rolled back. "
                "Serve what you served before the line, or retrain: tfdistill "
                f"line retrain {line.root} --span=NAME.",
            ]
        return ROLL_BACK, [said]
    if size < gate.canary_examples:
        return HOLD, [
            said,
            f"The canary period lasts until {gate.canary_examples:,} examples.",
        ]
    return PROMOTE, [said]


def _live(
    events: Sequence[Mapping[str, Any]], version: int | None
) -> tuple[float, int, int]:
    """The mean of a version's live log loss, its examples, and the reports."""
    own = [event for event in events if event["version"] == version]
    size = sum(event["examples"] for event in own)
    loss = sum(event["log_loss"] * event["examples"] for event in own)
    return loss / max(size, 1), size, len(own)
