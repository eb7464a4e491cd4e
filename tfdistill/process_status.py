"""What /proc tells of a process; nothing on systems without it.

`tfdistill.task_process` reads /proc by itself: it runs without this package.
"""

import os
import pathlib
from typing import NamedTuple

PROC = pathlib.Path("/proc")


class ProcessStatus(NamedTuple):
    """A process at one moment.

    Attributes:
        state: One letter, such as `S` for one that sleeps.
        started: When it began, in clock ticks since boot: with the process id
            it names a process even after the id is used again.
    """

    state: str
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return self.state not in ("Z", "X")


def of(pid: int) -> ProcessStatus | None:
    """Returns the status of a process, or None where none is told."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name, which may hold anything.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= 19:
        return None
    return ProcessStatus(fields[0], int(fields[19]))


def resident_bytes() -> int | None:
    """Returns this process' resident memory, or None where none is told."""
    try:
        fields = (PROC / "self" / "statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def started(pid: int) -> int:
    """Returns when a process began, in clock ticks; 0 where none is told."""
    found = of(pid)
    return found.started if found else 0


def machine() -> str:
    """Returns what names one boot of this machine, and this pid namespace.

    Process ids mean something to those alone for whom it is the same. Empty
    where the system does not tell.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        # Containers of one machine count their processes apart.
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def has_ended(pid: int, *, started: int) -> bool:
    """Whether a process of this machine is known to have ended.

    Args:
        pid: Its id, which may be another process' by now.
        started: When it began, as `of` tells.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # It is another user's.
    found = of(pid)
    if found is None:
        return False
    return not found.is_alive or found.started != started
