"""A run's status for people: groups, teachers, versions, faults."""

import rich.box
import rich.console
import rich.table
import rich.text

from tfdistill import group_status
from tfdistill import observed_run
from tfdistill import status_table
from tfdistill import teacher_status

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
    parts: list[rich.console.RenderableType] = [
        status_table.table(seen.groups, width=width)
    ]
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
    found = [status_table.line(status) for status in seen.groups]
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


def _cells(teacher: teacher_status.TeacherStatus) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return status_table.UNKNOWN if value is None else form.format(value)

    return (
        teacher.name,
        text(teacher.step, "{}"),
        teacher.health.replace("_", " ") or status_table.UNKNOWN,
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
            f"{_size(newest.num_bytes)}, {status_table.duration(age)} old"
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
        found += status_table.notes(status)
        found += _refused(status)
    return [*found, *(f"problem: {text}" for text in seen.problems)]


def _refused(status: group_status.GroupStatus) -> list[str]:
    """Returns the reasons of all refused versions but the newest, in lines."""
    return [
        f"group {status.group}, {teacher.name}, version {step} quarantined: "
        f"{reason}"
        for teacher in status.teachers
        for step, reason in sorted(teacher.quarantined.items())[:-1]
    ]
