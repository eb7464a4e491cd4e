"""Shows how far each group of a run has come, while it runs."""

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any
from typing import TextIO

import rich.console
import rich.live

from tfdistill import group_status
from tfdistill import status_table


class MetricsTail:
    """Reads the records that are appended to one metrics file from now on."""

    def __init__(self, path: pathlib.Path, *, last_bytes: int = 0) -> None:
        """Remembers where the file ends now, if it exists.

        Args:
            path: File of JSON objects, one a line. It may appear later.
            last_bytes: How much of what is there now is read, too. Default 0.
        """
        self._path = path
        self._partial = b""
        self._inode, size = self._find()
        # What begins within a line is no JSON object, and is left out.
        self._offset = max(0, size - last_bytes)

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
        self, statuses: Sequence[group_status.GroupStatus], *, now: float
    ) -> None:
        """Shows the present status.

        Args:
            statuses: All groups.
            now: Seconds since the launch.
        """
        if self._live is not None:
            width = self._live.console.width
            self._live.update(
                status_table.view(statuses, width=width), refresh=True
            )
            return
        for status in statuses:
            self._tell(status, now)
            line = status_table.line(status)
            when, state, shown = self._shown.get(status.group, (0.0, "", ""))
            early = now - when < self._interval_secs
            if line == shown or (early and status.state == state):
                continue
            self._shown[status.group] = (now, status.state, line)
            self.say(f"[{now:7.1f} s] {line}")

    def _tell(self, status: group_status.GroupStatus, now: float) -> None:
        for note in status_table.notes(status, errors=False):
            # The same fault of later versions is told once.
            gist = re.sub("[0-9]+", "", note)
            if gist not in self._told:
                self._told.add(gist)
                self.say(f"[{now:7.1f} s] {note}")

    def close(self) -> None:
        """Leaves the last table on the screen and ends the live display."""
        if self._live is not None:
            self._live.stop()
