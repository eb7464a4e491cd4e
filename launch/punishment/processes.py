"""Processes of this machine, told apart even where an id is used again.

Reads /proc, so Linux only.
"""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator

from tfdistill import process_status


@dataclasses.dataclass(frozen=True)
class Process:
    """One process, past or present.

    Attributes:
        pid: Its id, which another process may get after its end.
        started: When it began, in clock ticks since boot.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        found = process_status.of(self.pid)
        return (
            found is not None
            and found.started == self.started
            and found.is_alive
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        found = process_status.of(self.pid)
        return self.alive and found is not None and found.state == "T"

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal; returns False if the process is gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def find(pid: int) -> Process | None:
    """Returns the process with an id, or None if there is none."""
    found = process_status.of(pid)
    return Process(pid, found.started) if found else None


def with_variable(name: str, value: str) -> Iterator[Process]:
    """Yields the living processes started with a variable of this value.

    Args:
        name: Of the environment variable.
        value: Its whole value.
    """
    wanted = f"{name}={value}".encode()
    for entry in process_status.PROC.iterdir():
        if not entry.name.isdigit():
            continue
        # Processes end while they are looked at; others are not ours to read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = find(int(entry.name))
                if process is not None and process.alive:
                    yield process
