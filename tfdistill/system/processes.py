"""What a process is at, and whether an address answers.

`tfdistill.launcher.keeper` reads /proc by itself: it runs without this package.
"""

import enum
import errno
import os
import pathlib
import socket

PROC = pathlib.Path("/proc")
_CONNECT_SECS = 2.0


def state_of(pid: int) -> str | None:
    """Returns a process' state, such as `S` for one that sleeps, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name, which may hold anything.
    return text.rpartition(")")[2].split()[0]


def resident_bytes() -> int | None:
    """Returns this process's resident memory, or None if that is unknown."""
    try:
        fields = (PROC / "self" / "statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class Answer(enum.Enum):
    """What became of an attempt to connect."""

    OPEN = "takes connections"
    REFUSED = "refuses connections"
    SILENT = "does not answer"


def listener(port: int, *, backlog: int | None = None) -> socket.socket:
    """Listens on a port of all of this machine's addresses, IPv4 and IPv6.

    As TensorFlow's server does. 0 is any free port. OSError if that cannot be.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6,
                backlog=backlog,
                dualstack_ipv6=True,
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is turned off.
                raise
    return socket.create_server(("", port), backlog=backlog)


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
