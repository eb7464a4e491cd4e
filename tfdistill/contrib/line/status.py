"""A line over time, for people and for TensorBoard: read from its log alone."""

import datetime
from collections.abc import Mapping
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from tfdistill.contrib.line import store
from tfdistill.system import untrusted

_CANDIDATE, _PROMOTED, _REPLACED = "candidate", "promoted", "replaced"
_ROLLED_BACK = "rolled back"
_STYLES = {_PROMOTED: "bold green", _ROLLED_BACK: "yellow", "hold": "yellow"}
# Figures of a candidate shown in a row, and by version number in TensorBoard.
_FIGURES = {
    "tested": ("progressive_log_loss", "{:.4f}"),
    "log loss": ("log_loss", "{:.4f}"),
    "churn": ("churn", "{:.4f}"),
    "budget": ("churn_budget", "{:.4f}"),
    "examples": ("examples", "{:,.0f}"),
}
# Columns that a line of the log leaves out, or shows without brackets.
_OWN_COLUMNS = ("event", "time", "what", "before", "figures", "expected")
_LISTS = ("reasons", "undone")
_NOTES = """\
tested    log loss on the new span of the version promoted then, before training
log loss  of the candidate on the held-out rows; live: as it was reported back
churn     mean change of a prediction from that version to the candidate
budget    the churn that the retrain was allowed, and whether that was kept
"""


def figures(
    report: Mapping[str, Any], lineage: Mapping[str, Any]
) -> dict[str, float | None]:
    """Returns what is shown of a candidate over time."""
    of = report.get("figures", {})
    churn = report.get("estimates", {}).get("churn", {})
    return {
        "progressive_log_loss": lineage.get("progressive", {}).get("log_loss"),
        "promoted_log_loss": (of.get("promoted") or {}).get("log_loss"),
        "log_loss": (of.get("candidate") or {}).get("log_loss"),
        "churn": churn.get("value"),
        "churn_budget": lineage.get("churn_budget") or None,
        "examples": lineage.get("examples"),
    }


def moment(event: Mapping[str, Any]) -> str:
    """Returns when it happened."""
    at = datetime.datetime.fromtimestamp(event["time"], datetime.UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}"


def event_line(event: Mapping[str, Any]) -> str:
    """Returns an event of the log as a line of text."""
    said = [
        f"{name} {' '.join(map(str, value)) if name in _LISTS else value}"
        for name, value in event.items()
        if name not in _OWN_COLUMNS and value not in (None, "", [])
    ]
    start = f"{event['event']:>5}  {moment(event)}  {event['what']:<9}"
    return start + untrusted.one_line(", ".join(said), max_chars=2000)


def rows(line: store.Line) -> list[dict[str, Any]]:
    """Returns what became of each candidate, oldest first."""
    found: dict[int, dict[str, Any]] = {}
    for event in line.journal.events():
        what, version = event["what"], event.get("version")
        row = found.setdefault(event.get("number", version) or 0, {})
        if what == "retrain":
            row |= {"span": event["span"], "state": _CANDIDATE}
        elif what == "judge":
            row |= {**event["figures"], "verdict": event["verdict"]}
        elif what == "report":
            row["live"] = event["log_loss"]
        elif what in ("promote", "rollback"):
            for number, other in found.items():
                if number in event.get("undone", ()):
                    other["state"] = _ROLLED_BACK
                elif other.get("state") == _PROMOTED:
                    other["state"] = _REPLACED
            row["state"] = _PROMOTED
    found.pop(0, None)
    return [{"number": number, **row} for number, row in sorted(found.items())]


def show(line: store.Line) -> None:
    """Prints the line over time, and what is promoted and why."""
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 1000  # A pipe gets whole lines.
    names = ("version", "span", *_FIGURES, "kept", "live", "verdict", "state")
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, padding=0, collapse_padding=True
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(line):
        texts = (
            str(row["number"]),
            row.get("span"),
            *(_text(row.get(key), form) for key, form in _FIGURES.values()),
            _kept(row.get("churn"), row.get("churn_budget")),
            _text(row.get("live"), "{:.4f}"),
            row.get("verdict"),
            row.get("state"),
        )
        table.add_row(*map(_cell, texts))
    console.print(table)
    now = line.journal.pointer()
    text = "Nothing is promoted."
    if now.get("version") is not None:
        text = (
            f"Version {now['version']} has been promoted since {moment(now)} "
            f"UTC, by `{now['what']}`"
            + (f": {now['why']}" if now["why"] else " (no reason given).")
        )
    console.print(rich.text.Text(untrusted.one_line(text, max_chars=2000)))
    console.print(rich.text.Text(f"\n{_NOTES}"), end="")


def _text(value: Any, form: str) -> str | None:
    return None if value is None else form.format(value)


def _kept(churn: float | None, budget: float | None) -> str | None:
    if churn is None or not budget:
        return None
    return "yes" if churn <= budget else "no"


def _cell(text: str | None) -> rich.text.Text:
    text = untrusted.one_line(text or "-")
    return rich.text.Text(text, _STYLES.get(text, ""))


def write_points(line: store.Line, number: int, run: str) -> None:
    """Writes a candidate's figures to DIR/tensorboard, at step `number`.

    One file of events for each, so that what is written again is the same. A
    line in a store has none.
    """
    judged = [e for e in line.journal.events("judge") if e["number"] == number]
    if not judged or not line.is_local:
        return
    from tfdistill.statistics import events

    name = f"{run}/events.out.tfevents.{number:010}.line"
    values = {f"line/{k}": v for k, v in judged[-1]["figures"].items()}
    events.write(f"{line.root}/tensorboard/{name}", values, step=number)
