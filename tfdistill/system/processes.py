"""Whether a process lives and an address answers.

`tfdistill.launcher.keeper` reads /proc by itself: it runs without this package.
"""

import enum
import os
import pathlib
import socket
from typing import NamedTuple

PROC = pathlib.Path("/proc")
_CONNECT_SECS = 2.0


class ProcessStatus(NamedTuple):
    """A process at one moment."""

    # One letter, such as `S` for one that sleeps.
    state: str
    # In clock ticks since boot; tells it from a later process of the same id.
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return self.state not in ("Z", "X")


def status_of(pid: int) -> ProcessStatus | None:
    """Returns the status of a process, or None if that is unknown."""
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
    """Returns this process's resident memory, or None if that is unknown."""
    try:
        fields = (PROC / "self" / "statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def started(pid: int) -> int:
    """Returns when a process began, in clock ticks; 0 if unknown."""
    found = status_of(pid)
    return found.started if found else 0


def machine() -> str:
    """Returns what names one boot of this machine, and this pid namespace.

    Process ids only mean something to processes for which it is the same. Empty
    if the system does not say.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        # Containers of one machine count their processes apart.
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def has_ended(pid: int, *, started: int) -> bool:
    """Whether a process of this machine is known to have ended.

    Its id may be another process's by now, which `started` shows, unless 0.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # It is another user's.
    found = status_of(pid)
    if found is None:
        return False
    return not found.is_alive or 0 != started != found.started


class Answer(enum.Enum):
    """What became of an attempt to connect."""

    OPEN = "takes connections"
    REFUSED = "refuses connections"
    SILENT = "does not answer"


def ask(address: str, *, timeout_secs: float = _CONNECT_SECS) -> Answer:
    """Connects to `host:port` and hangs up.

    `REFUSED` means that the host is there without a listener; `SILENT` is all
    else, such as a host that is down or unknown.
    """
    host, _, port = address.rpartition(":")
    peer = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(peer, timeout=timeout_secs) as connection:
            # On a port without a listener that the kernel also hands out, a
            # connection may by chance meet itself.
            if connection.getsockname() == connection.getpeername():
                return Answer.REFUSED
    except ConnectionRefusedError:
        return Answer.REFUSED
    except OSError:
        return Answer.SILENT
    return Answer.OPEN
