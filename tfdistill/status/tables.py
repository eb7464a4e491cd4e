"""The status of a run for people (tables, lines) and for scripts (JSON).

Keys stay as they are within one `format`; docs/operations.md lists them. What
is not known is null.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
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
from tfdistill.system import untrusted

FORMAT = 1
_UNKNOWN = "-"
_Status = group.GroupStatus
_Teacher = group.TeacherStatus


def _text(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else form.format(value)


def _number(key: str, form: str) -> Callable[[_Status], str]:
    return lambda status: _text(status.number(key), form)


def _state(status: _Status) -> str:
    if status.silent_secs is None:
        is_on = status.state in ("starting", "running") and status.starting
        return f"{status.state}: {status.starting}" if is_on else status.state
    return f"{status.state} for {status.silent_secs:.0f} s"


def _step(status: _Status) -> str:
    step = _text(status.number("step"), "{:.0f}")
    total = status.number("total_steps")
    return step if total is None else f"{step}/{total:.0f}"


def _secs_left(status: _Status) -> float | None:
    return status.secs_left if status.state == "running" else None


def duration(secs: float | None) -> str:
    """Returns seconds as hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3661)
        ('1:00', '1:01:01')
    """
    if secs is None or not secs <= 999 * 3600:
        return _UNKNOWN
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


_CELLS: dict[str, Callable[[_Status], str]] = {
    "group": lambda status: str(status.group),
    "state": _state,
    "step": _step,
    "loss": _number("loss", "{:.4f}"),
    "distill loss": _number("distillation_loss", "{:.4f}"),
    "weight": _number("distillation_weight", "{:.3g}"),
    # Less than 0 if the teacher is ahead of its student.
    "staleness": _number("teacher_staleness", "{:.0f}"),
    "newest": lambda s: str(s.newest.step) if s.newest else _UNKNOWN,
    "quarantined": lambda status: str(status.num_quarantined or _UNKNOWN),
    "restarts": lambda s: str(
        s.num_restarts + s.num_worker_restarts or _UNKNOWN
    ),
    "examples/s": _number("examples_per_second", "{:,.0f}"),
    "time left": lambda status: duration(_secs_left(status)),
}
_TEACHER_CELLS: dict[str, Callable[[_Teacher], str]] = {
    "teacher": lambda teacher: teacher.name,
    "version": lambda teacher: _text(teacher.step, "{}"),
    "health": lambda teacher: teacher.health.replace("_", " ") or _UNKNOWN,
    "share": lambda teacher: _text(teacher.share, "{:.2f}"),
    "steps old": lambda teacher: _text(teacher.age_steps, "{}"),
    "secs old": lambda teacher: _text(teacher.age_secs, "{:.0f}"),
}
# What a narrow terminal leaves out, the least wanted first.
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


def group_line(status: _Status) -> str:
    """Returns the known values of a group in one line of text."""
    known = [
        f"{name.replace('distill ', 'distillation ')} {text}"
        for name, cell in _CELLS.items()
        if name not in _LEFT and (text := cell(status)) != _UNKNOWN
    ]
    return ", ".join([f"group {status.group}: {_state(status)}", *known])


def lines(run: group.RunStatus) -> list[str]:
    """Returns all that is known of a run in plain lines."""
    teachers = [
        f"group {status.group}, "
        + ", ".join(
            f"{name} {cell(teacher)}" for name, cell in _TEACHER_CELLS.items()
        )
        for status in run.groups
        for teacher in status.teachers
    ]
    groups = map(group_line, run.groups)
    notes = [*_warnings(run), *_notes(run)]
    return [*groups, *teachers, *notes, *_details(run)]


def view(
    run: group.RunStatus, *, width: int, whole: bool = True
) -> rich.console.RenderableType:
    """Returns the same as tables and notes for a terminal.

    The table of groups leaves out as many columns as it takes to fit `width`.
    Notes are wrapped. Unless `whole`, they are cut to one line each, and
    warnings are left out.
    """

    def text(line: str) -> rich.text.Text:
        if whole:
            return rich.text.Text(line)
        return rich.text.Text(line, no_wrap=True, overflow="ellipsis")

    rows = [
        [str(status.group), *(c(teacher) for c in _TEACHER_CELLS.values())]
        for status in run.groups
        for teacher in status.teachers
    ]
    teachers = [_table(["group", *_TEACHER_CELLS], rows)] if rows else []
    # First what needs attention: a live view loses its end on a low terminal.
    return rich.console.Group(
        _groups(run.groups, width),
        *map(text, _warnings(run) if whole else ()),
        *map(text, _notes(run)),
        *teachers,
        *map(text, _details(run)),
    )


def _groups(statuses: Sequence[_Status], width: int) -> rich.table.Table:
    columns = {
        name: [cell(status) for status in statuses]
        for name, cell in _CELLS.items()
    }
    for name in _DISPENSABLE:
        if _width(columns) <= width:
            break
        del columns[name]
    return _table(columns, zip(*columns.values(), strict=True))


def _width(columns: dict[str, list[str]]) -> int:
    widths = [
        max(rich.cells.cell_len(text) for text in (name, *cells))
        for name, cells in columns.items()
    ]
    return sum(widths) + len(widths) + 1


def _table(
    names: Iterable[str], rows: Iterable[Sequence[str]]
) -> rich.table.Table:
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, padding=0, collapse_padding=True
    )
    for name in names:
        is_text = name in (*_LEFT, *_TEACHER_CELLS)
        result.add_column(
            name, justify="left" if is_text else "right", no_wrap=True
        )
    for row in rows:
        # Not markup: a state or a name is text of others.
        result.add_row(*map(rich.text.Text, row))
    return result


def _warnings(run: group.RunStatus) -> Iterator[str]:
    for status in run.groups:
        for text in status.warnings:
            yield f"group {status.group}, warning: {untrusted.one_line(text)}"


def _notes(run: group.RunStatus, *, errors: bool = True) -> Iterator[str]:
    """Yields what a table has no room for: refused versions and errors."""
    for status in run.groups:
        who = f"group {status.group}"
        for teacher in status.teachers:
            yield from _refused(who, teacher)
            yield from _missed(who, teacher)
        if status.newest is not None and status.newest.broken:
            steps = ", ".join(map(str, status.newest.broken))
            yield f"{who} has published what cannot be read: {steps}"
        if errors and status.last_error:
            error = untrusted.one_line(status.last_error)
            yield f"{who}, last error: {error}"
    for problem in run.problems:
        yield f"problem: {problem}"


def _refused(who: str, teacher: _Teacher) -> Iterator[str]:
    if teacher.num_quarantined:
        reason, which = teacher.reason, ""
        if teacher.quarantined:
            step = max(teacher.quarantined)
            which, reason = f", last {step}", teacher.quarantined[step]
        yield (
            f"{who} has quarantined {teacher.num_quarantined} of "
            f"{teacher.name}{which}: {reason}"
        )
    elif teacher.health in ("dropped", "fading", "too_stale", "worse"):
        health = teacher.health.replace("_", " ")
        yield f"{who}: {teacher.name} is {health}: {teacher.reason}"


def _missed(who: str, teacher: _Teacher) -> Iterator[str]:
    """Yields that a peer often sends no predictions, or that others do."""
    if teacher.misses_many:
        yield (
            f"{who}, {teacher.name}: no predictions for {teacher.num_missed} "
            f"of {teacher.num_asked} batches"
        )
    if teacher.num_forged:
        yield f"{who}, refused messages of strangers: {teacher.num_forged}"


def _details(run: group.RunStatus) -> Iterator[str]:
    """Yields why older versions were refused, and how old the newest is."""
    for status in run.groups:
        for teacher in status.teachers:
            for step, reason in sorted(teacher.quarantined.items())[:-1]:
                yield (
                    f"group {status.group}, {teacher.name}, version {step} "
                    f"quarantined: {reason}"
                )
    for status in run.groups:
        if status.newest is not None:
            yield (
                f"group {status.group}, newest version: step "
                f"{status.newest.step}, {_size(status.newest.num_bytes)}, "
                f"{duration(run.age_secs(status.newest))} old"
            )


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power = min(4, (len(str(num_bytes)) - 1) // 3)
    return f"{num_bytes / 1000**power:.1f} {'kMGT'[power - 1]}B"


def document(workdir: str, run: group.RunStatus) -> dict[str, Any]:
    """Returns all that is known of a run for JSON."""
    return {
        "format": FORMAT,
        "workdir": workdir,
        "time": run.time,
        "over": run.over,
        "exit_code": run.exit_code,
        "exchange": run.exchange,
        "problems": list(run.problems),
        "groups": [_group_document(status, run) for status in run.groups],
    }


def _group_document(status: _Status, run: group.RunStatus) -> dict[str, Any]:
    last = run.last_lines.get(status.group, 0.0)
    numbers = (
        "loss",
        "task_loss",
        "distillation_loss",
        "distillation_weight",
        "examples_per_second",
    )
    newest = status.newest
    return {
        "group": status.group,
        "state": status.state,
        "silent_secs": status.silent_secs,
        "last_sign_secs": max(0.0, run.time - last) if last else None,
        "step": _whole(status.number("step")),
        "total_steps": _whole(status.number("total_steps")),
        "secs_left": _secs_left(status),
        **{name: status.number(name) for name in numbers},
        "newest_version": newest
        and {
            "step": newest.step,
            "bytes": newest.num_bytes,
            "age_secs": run.age_secs(newest),
            "broken": list(newest.broken),
        },
        "teachers": [_teacher_document(found) for found in status.teachers],
        "num_quarantined": status.num_quarantined,
        "restarts": status.num_restarts,
        "worker_restarts": status.num_worker_restarts,
        "last_error": status.last_error or None,
        "warnings": list(status.warnings),
    }


def _teacher_document(found: _Teacher) -> dict[str, Any]:
    return {
        **found._asdict(),
        "refused": dict(found.refused),
        "quarantined": [
            {"step": step, "reason": reason}
            for step, reason in sorted(found.quarantined.items())
        ],
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class Display:
    """Shows messages and the status of a run on one stream, while it runs."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        plain: bool | None = None,
        interval_secs: float = 5.0,
        errors: bool = False,
    ) -> None:
        """Chooses between a live view and, without a terminal, plain lines.

        Plain lines are written on each change of a group's state, and at most
        every `interval_secs` on other changes; each note once. A group's last
        error is among the notes if `errors`: a launcher reports it by `say`.
        """
        self._stream = sys.stdout if stream is None else stream
        self._interval_secs = interval_secs
        self._errors = errors
        self._shown: dict[int, tuple[float, str, str]] = {}
        self._reported: set[str] = set()
        self._began: float | None = None
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
        """Writes a message, above the live view if there is one.

        Nobody need read it, nor the disk have room for it.
        """
        with contextlib.suppress(OSError):
            if self._live is None:
                print(text, file=self._stream, flush=True)
            else:
                self._live.console.print(text, markup=False, highlight=False)

    def show(self, run: group.RunStatus) -> None:
        """Shows the present status; lines count seconds from the first call."""
        self._began = run.time if self._began is None else self._began
        now = run.time - self._began
        self._report(_warnings(run), now)
        if self._live is not None:
            found = view(run, width=self._live.console.width, whole=False)
            with contextlib.suppress(OSError):
                self._live.update(found, refresh=True)
            return
        self._report(_notes(run, errors=self._errors), now)
        for status in run.groups:
            line = group_line(status)
            when, state, shown = self._shown.get(status.group, (0.0, "", ""))
            early = now - when < self._interval_secs
            if line == shown or (early and status.state == state):
                continue
            self._shown[status.group] = (now, status.state, line)
            self.say(f"[{now:7.1f} s] {line}")

    def _report(self, notes: Iterable[str], now: float) -> None:
        """Writes those that are new."""
        for note in notes:
            # The same fault of a group's later versions is reported once.
            who, comma, what = note.partition(",")
            gist = who + comma + re.sub("[0-9]+", "", what)
            if gist not in self._reported:
                self._reported.add(gist)
                self.say(f"[{now:7.1f} s] {note}")

    def close(self) -> None:
        """Leaves the last view on the screen and ends the live display."""
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()
