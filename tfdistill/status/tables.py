"""What is shown of a run: tables for people, and lines for logs.

Unknown values are `-`.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TextIO

import rich.box
import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

from tfdistill.status import goodput
from tfdistill.status import group
from tfdistill.system import untrusted

UNKNOWN = "-"
# So many teachers of all groups are listed; if there are more, of those that
# are neither good nor, as all are at the start, absent. And so many notes.
_MOST_TEACHERS, _MOST_NOTES = 8, 16
_USUAL = ("good", "absent")
# A peer's missed batches are worth a note from this share of so many on.
_MANY_MISSED, _MIN_BATCHES = 0.1, 100
# Between two lines of a group as it was, at least; of many, one a second.
_INTERVAL_SECS = 5.0
_REFRESH_SECS = 0.5
_Status = group.GroupStatus
_Cell = Any  # A text, or what rich can render.


def _text(value: float | None, form: str = "{}") -> str:
    return UNKNOWN if value is None else form.format(value)


def _number(key: str, form: str) -> Callable[[_Status], str]:
    return lambda status: _text(status.record.get(key), form)


def _state(status: _Status) -> str:
    if status.silent_secs is not None:
        return f"{status.state} for {status.silent_secs:.0f} s"
    return status.state


def _validation(status: _Status) -> str:
    """The first metric; the loss if there is no other."""
    for name, value in status.validation.items():
        return f"{name.replace('_', ' ')} {value:.4f}"
    return UNKNOWN


def _step(status: _Status) -> str:
    total = status.record.get("total_steps")
    step = _text(status.record.get("step"))
    return step if total is None else f"{step}/{total}"


def _teachers(status: _Status) -> str:
    """How many are good, and the worst of the others."""
    if not status.teachers:
        return UNKNOWN
    others = [t for t in status.teachers if t["health"] != "good"]
    num_all = len(status.teachers)
    found = f"{num_all - len(others)}/{num_all} good"
    if not others:
        return found
    worst = min(others, key=lambda t: t["share"] or 0)
    return f"{found}, {worst['name']} {worst['health'].replace('_', ' ')}"


def _versions_used(teacher: Mapping[str, Any]) -> str:
    """How many of a peer's versions were used, of all that were published."""
    if teacher.get("lag_secs") is None:
        return UNKNOWN
    used = teacher["swaps"]
    return f"{used}/{used + teacher['num_unheard']}"


def _megabytes(teacher: Mapping[str, Any]) -> float | None:
    return teacher["bytes"] / 1e6 if teacher.get("bytes") else None


def duration(secs: float | None) -> str:
    """Returns seconds as hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3661)
        ('1:00', '1:01:01')
    """
    if secs is None:
        return UNKNOWN
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


# The texts of a group's row, by their column.
CELLS: dict[str, Callable[[_Status], str]] = {
    "group": lambda status: str(status.group),
    "state": _state,
    "step": _step,
    "task loss": lambda status: _text(status.task_loss, "{:.4f}"),
    "validation": _validation,
    "weight": _number("distillation_weight", "{:.3g}"),
    "teachers": _teachers,
    "newest": _number("published", "{:.0f}"),
    "restarts": lambda s: str(
        s.num_restarts + s.num_worker_restarts or UNKNOWN
    ),
    "goodput": lambda s: _text(s.spent.share, "{:.1%}"),
    "examples/s": _number("examples_per_second", "{:,.0f}"),
    "time left": lambda status: duration(status.secs_left),
}
_TEACHER_CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "teacher": lambda teacher: teacher["name"],
    "version": lambda teacher: (
        str(teacher["step"]) if teacher["step"] >= 0 else UNKNOWN
    ),
    "health": lambda teacher: teacher["health"].replace("_", " "),
    "share": lambda teacher: _text(teacher["share"], "{:.2f}"),
    # Less than 0 if the teacher is ahead of its student.
    "steps old": lambda teacher: _text(teacher["age_steps"]),
    # The link between the groups: versions used, their size and delay.
    "used": _versions_used,
    "MB": lambda teacher: _text(_megabytes(teacher), "{:.1f}"),
    "lag": lambda teacher: _text(teacher.get("lag_secs"), "{:.1f} s"),
    # On rows of its student's batches, beside the student's.
    "its loss": lambda teacher: _text(teacher.get("teacher_loss"), "{:.4f}"),
    "own loss": lambda teacher: _text(teacher.get("own_loss"), "{:.4f}"),
}
# The columns for which a narrow terminal has room, too.
_WIDE = 116
_NARROW = ("group", "state", "step", "task loss", "validation", "time left")
_LEFT = ("group", "state", "validation", "teachers", *_TEACHER_CELLS)
# So that columns stay where they are while their values grow.
_MIN_WIDTHS = {
    "state": 13,
    "step": 9,
    "task loss": 9,
    "validation": 15,
    "teachers": 8,
    "newest": 6,
    "time left": 9,
}
_BAR_WIDTH = 10
_STYLES = {
    "failed": "bold red",
    "silent": "bold red",
    "stopped": "yellow",
    "restarting": "yellow",
    "starting": "cyan",
    "running": "cyan",
    "done": "green",
}


def group_line(status: _Status) -> str:
    """Returns the known values of a group in one line of text."""
    known = [
        f"{name} {text}"
        for name, cell in CELLS.items()
        if name not in ("group", "state") and (text := cell(status)) != UNKNOWN
    ]
    return ", ".join([f"group {status.group}: {_state(status)}", *known])


def view(
    run: group.RunStatus, console: rich.console.Console, *, whole: bool = True
) -> rich.console.RenderableType:
    """Returns all that is known of a run, for people.

    Unless `whole`, notes are cut to one line each.
    """
    # Goodput has its own table, and a weight rarely changes.
    wide = [name for name in CELLS if name not in ("goodput", "weight")]
    names = wide if console.width >= _WIDE else _NARROW
    groups = [_row(s, names, run.time, console) for s in run.groups]
    teachers = [(s.group, t) for s in run.groups for t in s.teachers]
    if len(teachers) > _MOST_TEACHERS:
        teachers = [(g, t) for g, t in teachers if t["health"] not in _USUAL]
    rows = [
        [str(group), *(cell(teacher) for cell in _TEACHER_CELLS.values())]
        for group, teacher in teachers[:_MOST_TEACHERS]
    ]
    notes = [*_notes(run)]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"{len(notes) - _MOST_NOTES} more notes"]
    if console.is_terminal:
        names = [*names[:3], "", *names[3:]]
    return rich.console.Group(
        table(names, groups),
        *(
            rich.text.Text(
                note,
                no_wrap=not whole,
                overflow="fold" if whole else "ellipsis",
            )
            for note in notes
        ),
        table(("group", *_TEACHER_CELLS), rows) if rows else "",
        *_goodput(run),
    )


def _goodput(run: group.RunStatus) -> Iterator[rich.table.Table]:
    """Yields the table of goodput: of all groups, and of those that lost it."""
    whole = sum((s.spent for s in run.groups), goodput.Goodput())
    hit = [s for s in run.groups if s.num_restarts]
    if whole.total:
        rows = [[str(s.group), *_shares(s.spent)] for s in hit]
        rows.append(["all", *_shares(whole)])
        yield table(("group", "goodput", *goodput.CAUSES), rows)


def _shares(found: goodput.Goodput) -> list[str]:
    """Its share of the time, and the seconds that each cause took."""
    lost = [duration(found.lost[cause]) for cause in goodput.CAUSES]
    return [_text(found.share, "{:.1%}"), *lost]


def _row(
    status: _Status,
    names: Sequence[str],
    now: float,
    console: rich.console.Console,
) -> list[_Cell]:
    # Which teachers are not good is in their table, or in the notes.
    cells: list[_Cell] = [CELLS[n](status).partition(", ")[0] for n in names]
    cells[1] = state(status)
    if status.state in ("starting", "running") and not status.has_stepped:
        if status.since:
            cells[1].append(f" {duration(now - status.since)}")
    if console.is_terminal:
        total = status.record.get("total_steps")
        step = status.record.get("step") or 0
        bar = rich.progress_bar.ProgressBar(
            total=total or 1,
            completed=step if total else 0,
            width=_BAR_WIDTH,
            finished_style="green",
        )
        cells.insert(3, bar)
    return cells


def state(status: _Status) -> rich.text.Text:
    """Returns the state of a group in its color."""
    return rich.text.Text(_state(status), _STYLES.get(status.state, ""))


def table(
    names: Iterable[str], rows: Iterable[Sequence[_Cell]]
) -> rich.table.Table:
    """Returns a table; its cells are plain texts, whatever wrote them."""
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, padding=0, collapse_padding=True
    )
    for name in names:
        result.add_column(
            name,
            justify="left" if name in _LEFT else "right",
            no_wrap=True,
            min_width=_MIN_WIDTHS.get(name),
        )
    for cells in rows:
        result.add_row(
            *(
                rich.text.Text(untrusted.one_line(cell))
                if isinstance(cell, str)
                else cell
                for cell in cells
            )
        )
    return result


def _notes(run: group.RunStatus, *, errors: bool = True) -> Iterator[str]:
    """Yields what a table has no room for; what teachers did comes last."""
    for status in run.groups:
        notes = [f"warning: {text}" for text in status.warnings]
        if status.state == "running":
            notes += status.record.get("slow_workers", ())
        if errors and status.last_error:
            notes.append(f"last error: {status.last_error}")
        for note in notes:
            yield f"group {status.group}, {untrusted.one_line(note)}"
    for problem in run.problems:
        yield f"problem: {problem}"
    for status in run.groups:
        for note in itertools.chain(*map(_of_teacher, status.teachers)):
            yield f"group {status.group}, {untrusted.one_line(note)}"


def _of_teacher(teacher: Mapping[str, Any]) -> Iterator[str]:
    name, health = teacher["name"], teacher["health"]
    refused = {int(step): why for step, why in teacher["quarantined"].items()}
    if refused:
        step, total = max(refused), teacher["num_quarantined"]
        which = f"version {step} quarantined, {total} in all"
        yield f"{name}, {which}: {refused[step]}"
    elif teacher["reason"]:
        yield f"{name} is {health.replace('_', ' ')}: {teacher['reason']}"
    missed = teacher.get("num_missed", 0)
    asked = missed + teacher.get("num_answers", 0)
    if asked >= _MIN_BATCHES and missed > _MANY_MISSED * asked:
        yield f"{name}: no predictions for {missed} of {asked} batches"
    if forged := teacher.get("num_forged"):
        yield f"refused messages from outside the run: {forged}"


def console() -> rich.console.Console:
    """Returns what prints here; a pipe gets whole lines."""
    made = rich.console.Console()
    if not made.is_terminal:
        made.width = 1000
    return made


class Lines:
    """Shows messages and the status of a run as lines, while it runs."""

    def __init__(
        self, stream: TextIO | None = None, *, errors: bool = False
    ) -> None:
        """Shows nothing yet.

        A line is written on each change of a group's state, and every few
        seconds at most on other changes; each note once. A group's last error
        is among the notes if `errors`: a launcher reports it by `say`.
        """
        self._stream = sys.stdout if stream is None else stream
        self._errors = errors
        self._shown: dict[int, tuple[float, str, str]] = {}
        self._reported: set[str] = set()
        self._began: float | None = None

    def say(self, text: str) -> None:
        """Writes a message; a closed pipe or a full disk is ignored."""
        with contextlib.suppress(OSError):
            print(text, file=self._stream, flush=True)

    def show(self, run: group.RunStatus) -> None:
        """Shows the present status; lines count seconds from the first call."""
        self._began = run.time if self._began is None else self._began
        now = run.time - self._began
        for note in _notes(run, errors=self._errors):
            # The same fault of a group's later versions is reported once.
            who, comma, what = note.partition(",")
            gist = who + comma + re.sub("[0-9]+", "", what)
            if gist not in self._reported:
                self._reported.add(gist)
                self.say(f"[{now:7.1f} s] {note}")
        interval = max(_INTERVAL_SECS, len(run.groups))
        for status in run.groups:
            line = group_line(status)
            when, state, shown = self._shown.get(status.group, (0.0, "", ""))
            early = now - when < interval
            if line == shown or (early and status.state == state):
                continue
            self._shown[status.group] = (now, status.state, line)
            self.say(f"[{now:7.1f} s] {line}")


class Screen:
    """Shows a run on a terminal: messages scroll by, the table stays below."""

    def __init__(self, console: rich.console.Console, *, keep: bool) -> None:
        """Shows nothing yet; it is entered first, and keeps its last table."""
        self._console = console
        self._live = rich.live.Live(
            console=console, auto_refresh=False, transient=not keep
        )
        self._shown = 0.0

    def __enter__(self) -> "Screen":
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the table."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def say(self, text: str) -> None:
        """Writes a message above the table."""
        with contextlib.suppress(OSError):
            self._console.print(rich.text.Text(text))

    def show(self, run: group.RunStatus) -> None:
        """Shows the present status, at most twice a second."""
        if run.time - self._shown >= _REFRESH_SECS:
            self._shown = run.time
            shown = view(run, self._console, whole=False)
            with contextlib.suppress(OSError):
                self._live.update(shown, refresh=True)


@contextlib.contextmanager
def display(*, alone: bool = False) -> Iterator[Lines | Screen]:
    """Yields what shows a run here: a screen on a terminal, else lines.

    If it is `alone`, as nothing else reports of the run, groups' last errors
    are among the lines, and the last table stays.
    """
    console = rich.console.Console()
    if not console.is_interactive:
        yield Lines(errors=alone)
        return
    with Screen(console, keep=alone) as screen:
        yield screen
