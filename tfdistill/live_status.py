"""Shows how far each group of a run has come, while it runs."""

import re
import sys
from collections.abc import Sequence
from typing import TextIO

import rich.console
import rich.live

from tfdistill import group_status
from tfdistill import status_table


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
