"""The gate's report on a candidate: report.md, report.json and report.png."""

import json
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.statistics import plots
from tfdistill.statistics import tables
from tfdistill.system import run_files

NAME = "report"
# By name: what it is called, and its format.
_FIGURES = {
    "log_loss": ("log loss, nats", ".4f"),
    "accuracy": ("accuracy", ".4f"),
    "auc": ("AUC", ".4f"),
    "normalized_entropy": ("normalized entropy", ".4f"),
    "calibration": ("calibration: mean prediction / mean label", ".3f"),
    "offset": ("shift of all logits that would correct the mean", "+.3f"),
    "calibration_error": ("expected calibration error", ".4f"),
    "churn": ("churn: mean change of a prediction", ".4f"),
    "negative_flips": ("negative flips: right before, wrong now", ".4f"),
    "positive_flips": ("positive flips: wrong before, right now", ".4f"),
    "net_flips": ("negative minus positive flips", "+.4f"),
}
# Where the gate's word is another one.
_LIMITS = {"offset": "calibration"}
_OF_SLICES = ("auc", "calibration", "churn", "negative_flips")


def write(
    directory: str | pathlib.Path,
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes the report's three files.

    Args:
        directory: Directory of the candidate.
        report: What `gate.verdict` returns, and `number` and `parent`.
        history: For earlier candidates, oldest first: `number`, `log_loss`
            and `churn`.
    """
    path = pathlib.Path(directory)
    _draw(report, history, path / f"{NAME}.png")
    for ending, text in (
        ("json", json.dumps(report, indent=1) + "\n"),
        ("md", render(report)),
    ):
        run_files.write(path / f"{NAME}.{ending}", [text.encode()])


def render(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown: the verdict, its reasons, one table."""
    parent = report.get("parent")
    against = "no version before" if parent is None else f"version {parent}"
    gate, estimates = report["gate"], report["estimates"]
    own, base = (report["figures"][k] or {} for k in ("candidate", "promoted"))
    rows = [
        [
            told,
            tables.figure(own.get(name), shape),
            tables.figure(base.get(name), shape),
            estimate(estimates.get(name)),
            tables.figure(gate.get(_LIMITS.get(name, name)), ".4g")
            if name in estimates
            else "",
        ]
        for name, (told, shape) in _FIGURES.items()
        if name in own or name in estimates
    ]
    slices = []
    for name, found in report["slices"].items():
        own = found["figures"]["candidate"]
        slices.append(
            [
                name,
                f"{found['rows']:,}",
                estimate(found["log_loss"]) or "not judged",
                *(
                    tables.figure(own.get(k), _FIGURES[k][1])
                    for k in _OF_SLICES
                ),
            ]
        )
    interval = f"{100 * gate['confidence']:g}% interval"
    blocks = [
        f"# Candidate {report.get('number', '')}: {report['verdict']}",
        tables.bullets(report["reasons"]),
        tables.table(
            ["", "candidate", against, f"change, {interval}", "limit"], rows
        ),
        f"{report['rows']:,} held-out rows, {report['retrains']} retrain(s). "
        "The candidate is held unless the whole interval of the log loss is "
        "within its limit. Any other figure holds the candidate if its whole "
        "interval is beyond the limit. The shift of all logits is the "
        "candidate's own, measured on all rows of the span.",
        f"![calibration, slices, history]({NAME}.png)",
    ]
    if slices:
        head = ["slice", "rows", "change of the log loss", *_OF_SLICES]
        blocks += [
            "## Slices",
            tables.table(head, slices),
            f"The {interval}s of all slices hold at once; their limit is "
            f"{gate['slice_log_loss']}. A slice of fewer than "
            f"{gate['least_slice_rows']} rows is not judged.",
        ]
    if "controls" in report:
        blocks += ["## Controls", _controls(report)]
    return "\n\n".join(blocks) + "\n"


# What `retrain.train_controls` trains.
_CONTROLS = {
    "fresh": "new weights, all spans",
    "warm_start": "the promoted version's weights, without a teacher",
    "pair": "two groups that teach each other, too",
    "ensemble": "the mean of two warm starts",
}


def _controls(report: Mapping[str, Any]) -> str:
    found = report["controls"]
    own = report["figures"]["candidate"]
    examples = found["warm_start"]["examples"]
    named = {"this candidate": {**own, "examples": examples}} | {
        told: found[name] for name, told in _CONTROLS.items()
    }
    rows = [
        [
            told,
            tables.figure(one["log_loss"], ".4f"),
            tables.figure(one["churn"], ".4f"),
            f"{one['examples']:,}",
        ]
        for told, one in named.items()
    ]
    head = ["", "log loss", "churn to the promoted", "examples"]
    return tables.table(head, rows)


def estimate(found: Mapping[str, Any] | None) -> str:
    """Returns a change with its interval as text; empty without one."""
    if not found:
        return ""
    return tables.figure(found["value"], "+.4f", found["interval"])


def _draw(
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    path: pathlib.Path,
) -> None:
    figure, axes = plots.figure(15, 4.5, columns=3)
    curves, by_slice, over_time = axes
    for name, points in report["curves"].items():
        said, came, _ = zip(*points, strict=True)
        curves.plot(said, came, marker="o", markersize=3, label=name)
    if report["curves"]:
        curves.axline((0, 0), slope=1, **plots.REFERENCE)
        curves.legend(fontsize="small")
    curves.set(xlabel="mean prediction", ylabel="mean label")
    found = {"all rows": report["estimates"].get("log_loss")} | {
        name: one["log_loss"] for name, one in report["slices"].items()
    }
    for name, estimate in found.items():
        if estimate:
            by_slice.plot(estimate["interval"], [name, name], color="C0")
            by_slice.plot(estimate["value"], name, "o", color="C0")
    by_slice.axvline(0, **plots.REFERENCE)
    by_slice.invert_yaxis()
    by_slice.set(xlabel="change of the log loss, nats")
    churn = over_time.twinx()
    for axes, name, color in (
        (over_time, "log_loss", "C0"),
        (churn, "churn", "C1"),
    ):
        known = [one for one in history if one.get(name) is not None]
        axes.plot(
            [one["number"] for one in known],
            [one[name] for one in known],
            *("o-",),
            color=color,
        )
        axes.set_ylabel(name.replace("_", " "), color=color)
    over_time.set_xlabel("candidate")
    over_time.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=100)
