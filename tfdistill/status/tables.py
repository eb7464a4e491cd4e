"""The status of a run for people (tables, lines) and for scripts (JSON).

Keys stay as they are within one `format`; docs/operations.md lists them. What
is not known is null.
"""

import re
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TextIO

import rich.box
import rich.cells
import rich.console
import rich.live
import rich.table
import rich.text

from tfdistill.status import group
from tfdistill.status import observed_run
from tfdistill.system import untrusted

UNKNOWN = "-"
_Status = group.GroupStatus
# What is left out first where a terminal is narrow, the least wanted first.
_DISPENSABLE = (
    "examples/s",
    "distill loss",
    "weight",
    "restarts",
    "time left",
    "quarantined",
    "newest",
    "staleness",
)
_LEFT = ("group", "state")


def state(status: _Status) -> str:
    """Returns a group's state in words."""
    if status.silent_secs is None:
        return status.state
    return f"{status.state} for {status.silent_secs:.0f} s"


def _step(status: _Status) -> str:
    step = _number(status, "step", "{:.0f}")
    total = _number(status, "total_steps", "{:.0f}")
    return step if total == UNKNOWN else f"{step}/{total}"


def _number(status: _Status, key: str, form: str) -> str:
    value = status.number(key)
    return UNKNOWN if value is None else form.format(value)


def _newest(status: _Status) -> str:
    return UNKNOWN if status.newest is None else str(status.newest.step)


def _left(status: _Status) -> str:
    secs = status.secs_left if status.state == "running" else None
    return UNKNOWN if secs is None else duration(secs)


_CELLS: dict[str, Callable[[_Status], str]] = {
    "group": lambda status: str(status.group),
    "state": state,
    "step": _step,
    "loss": lambda status: _number(status, "loss", "{:.4f}"),
    "distill loss": lambda s: _number(s, "distillation_loss", "{:.4f}"),
    "weight": lambda s: _number(s, "distillation_weight", "{:.3g}"),
    # Less than 0 where the teacher is ahead of its student.
    "staleness": lambda s: _number(s, "teacher_staleness", "{:.0f}"),
    "newest": _newest,
    "quarantined": lambda status: str(status.num_quarantined or UNKNOWN),
    "restarts": lambda s: str(
        s.num_restarts + s.num_worker_restarts or UNKNOWN
    ),
    "examples/s": lambda s: _number(s, "examples_per_second", "{:,.0f}"),
    "time left": _left,
}


def duration(secs: float) -> str:
    """Returns a time as hours, minutes and seconds.

    Args:
        secs: Seconds.

    Example:
        >>> duration(59.6), duration(3661)
        ('1:00', '1:01:01')
    """
    if not secs <= 999 * 3600:
        return UNKNOWN
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def group_line(status: _Status) -> str:
    """Returns the known values of a group in one line of text."""
    known = [
        f"{name.replace('distill ', 'distillation ')} {text}"
        for name, cell in _CELLS.items()
        if name not in _LEFT and (text := cell(status)) != UNKNOWN
    ]
    return ", ".join([f"group {status.group}: {state(status)}", *known])


def table(
    statuses: Sequence[_Status], *, width: int | None = None
) -> rich.table.Table:
    """Returns the table of all groups for a terminal.

    Args:
        statuses: All groups.
        width: Columns of the terminal: as many columns of the table are left
            out as it takes to fit. Default: none is.
    """
    columns = {
        name: [cell(status) for status in statuses]
        for name, cell in _CELLS.items()
    }
    for name in _DISPENSABLE:
        if width is None or _width(columns) <= width:
            break
        del columns[name]
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, padding=0, collapse_padding=True
    )
    for name in columns:
        result.add_column(
            name, justify="left" if name in _LEFT else "right", no_wrap=True
        )
    for row in zip(*columns.values(), strict=True):
        # Not markup: a state or a name is text of others.
        result.add_row(*map(rich.text.Text, row))
    return result


def _width(columns: dict[str, list[str]]) -> int:
    widths = [
        max(rich.cells.cell_len(text) for text in (name, *cells))
        for name, cells in columns.items()
    ]
    return sum(widths) + len(widths) + 1


def notes(status: _Status, *, errors: bool = True) -> list[str]:
    """Returns what a table has no room for: refused versions and errors.

    Args:
        status: A group.
        errors: Whether the last error is among them. Default True.
    """
    found = []
    for teacher in status.teachers:
        if teacher.num_quarantined:
            reason = teacher.reason
            which = ""
            if teacher.quarantined:
                step = max(teacher.quarantined)
                which, reason = f", last {step}", teacher.quarantined[step]
            found.append(
                f"group {status.group} has quarantined "
                f"{teacher.num_quarantined} of {teacher.name}{which}: {reason}"
            )
        elif teacher.health in ("dropped", "fading", "too_stale"):
            health = teacher.health.replace("_", " ")
            found.append(
                f"group {status.group}: {teacher.name} is {health}: "
                f"{teacher.reason}"
            )
    if status.newest is not None and status.newest.broken:
        steps = ", ".join(map(str, status.newest.broken))
        found.append(
            f"group {status.group} has published what cannot be read: {steps}"
        )
    if errors and status.last_error:
        found.append(
            f"group {status.group}, last error: "
            f"{untrusted.one_line(status.last_error)}"
        )
    return found


def groups_table(
    statuses: Sequence[_Status], *, width: int
) -> rich.console.RenderableType:
    """Returns the table with its notes below, each cut to one line.

    Args:
        statuses: All groups.
        width: Columns of the terminal.
    """
    below = [
        rich.text.Text(text, no_wrap=True, overflow="ellipsis")
        for status in statuses
        for text in notes(status)
    ]
    return rich.console.Group(table(statuses, width=width), *below)


_COLUMNS = (
    "group",
    "teacher",
    "version",
    "health",
    "share",
    "steps old",
    "secs old",
)


def view(
    seen: observed_run.Observation, *, width: int
) -> rich.console.RenderableType:
    """Returns the tables of groups and of teachers, and what to note.

    Args:
        seen: The run.
        width: Columns of the terminal.
    """
    parts: list[rich.console.RenderableType] = [table(seen.groups, width=width)]
    if any(status.teachers for status in seen.groups):
        parts.append(_teachers(seen))
    texts = [*_versions(seen), *_notes(seen)]
    # Whole, not cut to the width: who looks once wants to read it.
    return rich.console.Group(*parts, *map(rich.text.Text, texts))


def lines(seen: observed_run.Observation) -> list[str]:
    """Returns the same in plain lines.

    Args:
        seen: The run.
    """
    found = [group_line(status) for status in seen.groups]
    for status in seen.groups:
        found += [
            f"group {status.group}, teacher "
            + ", ".join(
                f"{name} {text}"
                for name, text in zip(
                    _COLUMNS[1:], _cells(teacher), strict=True
                )
            ).removeprefix("teacher ")
            for teacher in status.teachers
        ]
    return [*found, *_versions(seen), *_notes(seen)]


def _teachers(seen: observed_run.Observation) -> rich.table.Table:
    result = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0)
    for name in _COLUMNS:
        result.add_column(name, no_wrap=True)
    for status in seen.groups:
        for teacher in status.teachers:
            cells = (str(status.group), *_cells(teacher))
            result.add_row(*map(rich.text.Text, cells))
    return result


def _cells(teacher: group.TeacherStatus) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return UNKNOWN if value is None else form.format(value)

    return (
        teacher.name,
        text(teacher.step, "{}"),
        teacher.health.replace("_", " ") or UNKNOWN,
        text(teacher.share, "{:.2f}"),
        text(teacher.age_steps, "{}"),
        text(teacher.age_secs, "{:.0f}"),
    )


def _versions(seen: observed_run.Observation) -> list[str]:
    """Returns a line on the newest version of each group."""
    found = []
    for status in seen.groups:
        newest = status.newest
        if newest is None:
            continue
        age = max(0.0, seen.time - (newest.modified or newest.created))
        found.append(
            f"group {status.group}, newest version: step {newest.step}, "
            f"{_size(newest.num_bytes)}, {duration(age)} old"
        )
    return found


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power = min(4, (len(str(num_bytes)) - 1) // 3)
    return f"{num_bytes / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _notes(seen: observed_run.Observation) -> list[str]:
    found = []
    for status in seen.groups:
        found += notes(status)
        found += _refused(status)
    return [*found, *(f"problem: {text}" for text in seen.problems)]


def _refused(status: group.GroupStatus) -> list[str]:
    """Returns the reasons of all refused versions but the newest, in lines."""
    return [
        f"group {status.group}, {teacher.name}, version {step} quarantined: "
        f"{reason}"
        for teacher in status.teachers
        for step, reason in sorted(teacher.quarantined.items())[:-1]
    ]


FORMAT = 1
# Logs of `fit` that have a key of their own.
_NUMBERS = {
    "loss": "loss",
    "task_loss": "task_loss",
    "distillation_loss": "distillation_loss",
    "distillation_weight": "distillation_weight",
    "examples_per_second": "examples_per_second",
}


def document(workdir: str, seen: observed_run.Observation) -> dict[str, Any]:
    """Returns the document.

    Args:
        workdir: Directory of the run.
        seen: The run.
    """
    return {
        "format": FORMAT,
        "workdir": workdir,
        "time": seen.time,
        "over": seen.over,
        "exit_code": seen.exit_code,
        "exchange": seen.exchange,
        "problems": seen.problems,
        "groups": [_group(status, seen) for status in seen.groups],
    }


def _group(
    status: group.GroupStatus, seen: observed_run.Observation
) -> dict[str, Any]:
    last = seen.last_lines.get(status.group, 0.0)
    return {
        "group": status.group,
        "state": status.state,
        "silent_secs": status.silent_secs,
        "last_sign_secs": max(0.0, seen.time - last) if last else None,
        "step": _whole(status.number("step")),
        "total_steps": _whole(status.number("total_steps")),
        "secs_left": status.secs_left if status.state == "running" else None,
        **{key: status.number(name) for key, name in _NUMBERS.items()},
        "newest_version": _newest_version(status, seen.time),
        "teachers": [_teacher(teacher) for teacher in status.teachers],
        "num_quarantined": status.num_quarantined,
        "restarts": status.num_restarts,
        "worker_restarts": status.num_worker_restarts,
        "last_error": status.last_error or None,
    }


def _newest_version(
    status: group.GroupStatus, now: float
) -> dict[str, Any] | None:
    found = status.newest
    if found is None:
        return None
    return {
        "step": found.step,
        "bytes": found.num_bytes,
        "age_secs": max(0.0, now - (found.modified or found.created)),
        "broken": list(found.broken),
    }


def _teacher(found: group.TeacherStatus) -> dict[str, Any]:
    return {
        **found._asdict(),
        "quarantined": [
            {"step": step, "reason": reason}
            for step, reason in sorted(found.quarantined.items())
        ],
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class Display:
    """Shows messages and the status of the groups on one stream."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        plain: bool | None = None,
        interval_secs: float = 5.0,
    ) -> None:
        """Chooses between a live table and plain lines.

        What a table says below itself is said once in plain lines.

        Args:
            stream: Where to write. Default `sys.stdout`.
            plain: Whether to write lines. Default: if it is not a terminal.
            interval_secs: Least time between two plain lines on a group whose
                state stays the same.
        """
        self._stream = sys.stdout if stream is None else stream
        self._interval_secs = interval_secs
        self._shown: dict[int, tuple[float, str, str]] = {}
        self._told: set[str] = set()
        self._live: rich.live.Live | None = None
        console = rich.console.Console(file=self._stream)
        if plain is None:
            plain = not console.is_terminal or console.is_dumb_terminal
        if not plain:
            self._live = rich.live.Live(
                console=console, auto_refresh=False, redirect_stderr=False
            )
            self._live.start()

    def say(self, text: str) -> None:
        """Writes a message, above the table if there is one."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def show(
        self, statuses: Sequence[group.GroupStatus], *, now: float
    ) -> None:
        """Shows the present status.

        Args:
            statuses: All groups.
            now: Seconds since the launch.
        """
        if self._live is not None:
            width = self._live.console.width
            self._live.update(groups_table(statuses, width=width), refresh=True)
            return
        for status in statuses:
            self._tell(status, now)
            line = group_line(status)
            when, state, shown = self._shown.get(status.group, (0.0, "", ""))
            early = now - when < self._interval_secs
            if line == shown or (early and status.state == state):
                continue
            self._shown[status.group] = (now, status.state, line)
            self.say(f"[{now:7.1f} s] {line}")

    def _tell(self, status: group.GroupStatus, now: float) -> None:
        for note in notes(status, errors=False):
            # The same fault of later versions is told once.
            gist = re.sub("[0-9]+", "", note)
            if gist not in self._told:
                self._told.add(gist)
                self.say(f"[{now:7.1f} s] {note}")

    def close(self) -> None:
        """Leaves the last table on the screen and ends the live display."""
        if self._live is not None:
            self._live.stop()
