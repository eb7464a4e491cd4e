"""Shows how far each group of a run has come, while it runs."""

import collections
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TextIO

import rich.box
import rich.console
import rich.live
import rich.table

_COLUMNS = (
    "group",
    "state",
    "step",
    "loss",
    "distillation loss",
    "staleness",
    "examples/s",
    "time left",
)
_UNKNOWN = "-"


class MetricsTail:
    """Reads the records that are appended to one metrics file from now on."""

    def __init__(self, path: pathlib.Path) -> None:
        """Remembers where the file ends now, if it exists.

        Args:
            path: File of JSON objects, one a line. It may appear later.
        """
        self._path = path
        self._partial = b""
        self._inode, self._offset = self._find()

    def read(self) -> list[dict[str, Any]]:
        """Returns the records completed since the last call.

        Lines that are not JSON objects are left out: a task may have been
        killed in the middle of one.
        """
        inode, size = self._find()
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, self._partial = inode, 0, b""
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [record for line in lines if (record := _parse(line))]

    def _find(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


@dataclasses.dataclass
class GroupStatus:
    """What is known of one group.

    Attributes:
        group: Index of the group.
        state: `starting`, `running`, `stopping`, `done`, `failed`, `stopped`.
        record: The newest value of every key seen in the group's metrics.
    """

    group: int
    state: str = "starting"
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    _pace: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=20), repr=False
    )

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer records, the newest last."""
        for record in records:
            self.record.update(record)
            step, time = _number(record, "step"), _number(record, "time")
            if step is None or time is None or not math.isfinite(step + time):
                continue
            if self._pace and step < self._pace[-1][0]:
                self._pace.clear()  # The group went back to a backup.
            self._pace.append((step, time))

    @property
    def secs_left(self) -> float | None:
        """Seconds to the last step at the recent pace; None if unknown."""
        total = _number(self.record, "total_steps")
        if total is None or not math.isfinite(total) or len(self._pace) < 2:
            return None
        (first_step, first_time), (step, time) = self._pace[0], self._pace[-1]
        if step <= first_step or time <= first_time:
            return None
        return (
            max(0.0, total - step) * (time - first_time) / (step - first_step)
        )

    def cells(self) -> tuple[str, ...]:
        """Returns the text for each column of the table."""
        record = self.record
        step = _text(record, "step", "{:.0f}")
        total = _text(record, "total_steps", "{:.0f}")
        left = self.secs_left if self.state == "running" else None
        return (
            str(self.group),
            self.state,
            step if total == _UNKNOWN else f"{step}/{total}",
            _text(record, "loss", "{:.4f}"),
            _text(record, "distillation_loss", "{:.4f}"),
            _text(record, "teacher_staleness", "{:.0f}"),
            _text(record, "examples_per_second", "{:,.0f}"),
            _UNKNOWN if left is None else _duration(left),
        )

    def line(self) -> str:
        """Returns the known values in one line of text."""
        group, state, *values = self.cells()
        known = [
            f"{name} {value}"
            for name, value in zip(_COLUMNS[2:], values, strict=True)
            if value != _UNKNOWN
        ]
        return ", ".join([f"group {group}: {state}", *known])


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _text(record: Mapping[str, Any], key: str, form: str) -> str:
    value = _number(record, key)
    return _UNKNOWN if value is None else form.format(value)


def _duration(secs: float) -> str:
    if secs > 999 * 3600:
        return _UNKNOWN
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def table(statuses: Sequence[GroupStatus]) -> rich.table.Table:
    """Returns the table of all groups for a terminal."""
    result = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0)
    for name in _COLUMNS:
        is_text = name in ("group", "state")
        result.add_column(
            name.replace("distillation", "distill"),  # Fits 80 columns.
            justify="left" if is_text else "right",
            no_wrap=is_text or name == "step",
        )
    for status in statuses:
        result.add_row(*status.cells())
    return result


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

        Args:
            stream: Where to write. Default `sys.stdout`.
            plain: Whether to write lines. Default: if it is not a terminal.
            interval_secs: Least time between two plain lines on a group whose
                state stays the same.
        """
        self._stream = sys.stdout if stream is None else stream
        self._interval_secs = interval_secs
        self._shown: dict[int, tuple[float, str, str]] = {}
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

    def show(self, statuses: Sequence[GroupStatus], *, now: float) -> None:
        """Shows the present status.

        Args:
            statuses: All groups.
            now: Seconds since the launch.
        """
        if self._live is not None:
            self._live.update(table(statuses), refresh=True)
            return
        for status in statuses:
            line = status.line()
            when, state, shown = self._shown.get(status.group, (0.0, "", ""))
            early = now - when < self._interval_secs
            if line == shown or (early and status.state == state):
                continue
            self._shown[status.group] = (now, status.state, line)
            self.say(f"[{now:7.1f} s] {line}")

    def close(self) -> None:
        """Leaves the last table on the screen and ends the live display."""
        if self._live is not None:
            self._live.stop()
