"""What a run came to, for people: its figures, its files, and what is next."""

import collections
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import rich.console
import rich.text

from tfdistill.status import group
from tfdistill.status import tables
from tfdistill.system import run_files
from tfdistill.system import untrusted

_MOST_METRICS, _MOST_STUDENTS = 6, 4
# In a group's directory, if the group has written any.
_STUDENT, _BACKUP, _TENSORBOARD = "student.keras", "backup", "tensorboard"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commands:
    """What can be typed next; empty if there is no such command."""

    new: str = ""
    resume: str = ""
    two_groups: str = ""
    compare: str = ""


def view(
    run: group.RunStatus,
    *,
    workdir: pathlib.Path,
    exchange: str,
    secs: float,
    commands: Commands,
) -> rich.console.RenderableType:
    """Returns what is shown of a run that is over, after so many seconds."""
    states = collections.Counter(status.state for status in run.groups)
    counted = ", ".join(f"{n} {state}" for state, n in states.items())
    headline = f"groups: {counted} after {tables.duration(secs)}"
    before = [s.finished_before for s in run.groups if s.finished_before]
    if before and len(before) == len(run.groups):
        step = max(status.record["step"] for status in run.groups)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(before)))
        headline = (
            f"finished at step {step} on {when}; nothing was trained; to start "
            f"a new run: {commands.new or 'choose another workdir'}"
        )
    failed = [status for status in run.groups if status.state == "failed"]
    rows = [
        *(("failed", f"group {s.group}: {s.last_error}") for s in failed),
        *_files(run, workdir, exchange),
        *(("next", text) for text in _next(run, workdir, commands)),
    ]
    width = max(len(name) for name, _ in rows) + 2
    # Lines that are not broken, so that a command can be copied.
    lines = [
        rich.text.Text.assemble(
            (f" {name:<{width}}", "bold"), untrusted.one_line(text)
        )
        for name, text in rows
    ]
    return rich.console.Group(
        "", rich.text.Text(headline, "bold"), _figures(run, workdir), *lines
    )


def short(path: str | os.PathLike[str]) -> str:
    """Returns a path as it is read from here; a URL as it is."""
    return os.fspath(path).removeprefix(os.path.join(os.getcwd(), ""))


def _group_files(
    run: group.RunStatus, workdir: pathlib.Path, pattern: str
) -> list[pathlib.Path]:
    """Returns the files of each group that match."""
    names = [run_files.group_name(status.group) for status in run.groups]
    return [path for name in names for path in (workdir / name).glob(pattern)]


def _results(directory: pathlib.Path, key: str) -> dict[str, float]:
    """Returns a part of results.json; nothing if it isn't there."""
    try:
        found = json.loads((directory / run_files.RESULTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found.get(key) or {}


def _metrics(
    status: group.GroupStatus, workdir: pathlib.Path
) -> dict[str, float]:
    """Returns the metrics of a recipe's results, or else of the logs."""
    found = _results(workdir / run_files.group_name(status.group), "metrics")
    if not found:
        found = {f"val_{n}": x for n, x in status.validation.items()}
    if not found and status.task_loss is not None:
        found = {"task loss": status.task_loss}
    return found


def _figures(
    run: group.RunStatus, workdir: pathlib.Path
) -> rich.console.RenderableType:
    """Returns a row for each group, and the columns of which any is known."""
    rows: list[dict[str, Any]] = []
    for status in run.groups:
        figures = [*_metrics(status, workdir).items()][:_MOST_METRICS]
        row = {name: tables.CELLS[name](status) for name in ("group", "step")}
        row |= {name: f"{value:.4f}" for name, value in figures}
        if not status.finished_before:
            if "step" in status.record:
                row["goodput"] = tables.CELLS["goodput"](status)
            row["time"] = tables.duration(status.spent.total or None)
        rows.append({n: x for n, x in row.items() if x != tables.UNKNOWN})
    # The last columns of a group may be the only ones of another.
    names = dict.fromkeys(n for row in sorted(rows, key=len)[::-1] for n in row)
    return tables.table(
        ["group", "state", *[*names][1:]],
        (
            [
                row["group"],
                tables.state(status),
                *(row.get(n, tables.UNKNOWN) for n in [*names][1:]),
            ]
            for row, status in zip(rows, run.groups, strict=True)
        ),
    )


def _files(
    run: group.RunStatus, workdir: pathlib.Path, exchange: str
) -> Iterator[tuple[str, str]]:
    here = short(workdir)
    if between := _results(workdir, "agreement"):
        told = [f"{n.replace('_', ' ')} {x:.4f}" for n, x in between.items()]
        yield "between groups", ", ".join(told)
    if (workdir / run_files.RESULTS).exists():
        yield "results", f"{here}/{run_files.RESULTS}"
    yield "logs", f"{here}/logs"
    students = [short(path) for path in _group_files(run, workdir, _STUDENT)]
    students = students or [
        "/".join(
            [
                short(exchange),
                *filter(None, [status.record.get("exchange")]),
                run_files.group_name(status.group),
                str(version),
            ]
        )
        for status in run.groups
        if (version := status.record.get("published"))
    ]
    if students:
        more = ", ..." * (len(students) > _MOST_STUDENTS)
        yield "students", ", ".join(students[:_MOST_STUDENTS]) + more
    if _group_files(run, workdir, _TENSORBOARD):
        yield "TensorBoard", f"tensorboard --logdir {here}"


def _next(
    run: group.RunStatus, workdir: pathlib.Path, commands: Commands
) -> Iterator[str]:
    """Yields what to do: first about what went wrong."""
    untaught = collections.defaultdict[str, list[str]](list)
    for status in run.groups:
        if why := status.record.get("untaught"):
            untaught[why].append(str(status.group))
    for why, groups in untaught.items():
        plural = "s" * (len(groups) > 1)
        which = f"group{plural} {', '.join(groups)}"
        yield f"{which} never used a teacher: {why}"
    if any(status.state != "done" for status in run.groups):
        if commands.resume and _group_files(run, workdir, _BACKUP):
            yield f"resume the run: {commands.resume}"
    elif len(run.groups) == 1 and commands.two_groups:
        if "distillation_weight" in run.groups[0].record:
            yield f"let two groups teach each other: {commands.two_groups}"
    elif commands.compare and not untaught:
        yield f"check whether it's worth it: {commands.compare}"
