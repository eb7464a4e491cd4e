"""Processes of this machine, told apart even where an id is used again.

Reads /proc, so Linux only.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
from collections.abc import Iterator

_PROC = pathlib.Path("/proc")


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
        found = _stat(self.pid)
        return (
            found is not None
            and int(found[19]) == self.started
            and found[0] not in ("Z", "X")
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        found = _stat(self.pid)
        return self.alive and found is not None and found[0] == "T"

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
    found = _stat(pid)
    return Process(pid, int(found[19])) if found else None


def with_variable(name: str, value: str) -> Iterator[Process]:
    """Yields the living processes started with a variable of this value.

    Args:
        name: Of the environment variable.
        value: Its whole value.
    """
    wanted = f"{name}={value}".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        # Processes end while they are looked at; others are not ours to read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = find(int(entry.name))
                if process is not None and process.alive:
                    yield process


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in brackets, may itself hold brackets and spaces.
    return text.rpartition(")")[2].split() or None
