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
