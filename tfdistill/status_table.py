"""The status of all groups as a table, and as lines where there is none."""

from collections.abc import Callable
from collections.abc import Sequence

import rich.box
import rich.cells
import rich.console
import rich.table
import rich.text

from tfdistill import group_status
from tfdistill import plain_text

UNKNOWN = "-"
_Status = group_status.GroupStatus
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


def line(status: _Status) -> str:
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
            f"{plain_text.one_line(status.last_error)}"
        )
    return found


def view(
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
