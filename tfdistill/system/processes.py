"""What a process is at, where it runs, and whether an address answers.

`tfdistill.launcher.keeper` reads /proc by itself: it runs without this package.
"""

import contextlib
import enum
import errno
import os
import pathlib
import re
import socket

PROC = pathlib.Path("/proc")
_CONNECT_SECS = 2.0
# In /proc/net/if_inet6, an address beyond one machine or link.
_GLOBAL_SCOPE = "00"


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


def machine() -> str:
    """Returns what two processes have in common on one machine only.

    They find each other by loopback and by process id. A host name says too
    little: containers and cloned machines may share one.
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        own = PROC / "self" / "ns"
        spaces = [(own / kind).stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return socket.gethostname()
    return "/".join(map(str, [boot, *spaces]))


def own_addresses() -> list[str]:
    """Returns this machine's addresses that other machines may reach."""
    try:
        ipv4 = (PROC / "net/fib_trie").read_text()
        found = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", ipv4)
    except OSError:
        found = []
    with contextlib.suppress(OSError):
        for line in (PROC / "net/if_inet6").read_text().splitlines():
            address, _, _, scope = line.split()[:4]
            if scope == _GLOBAL_SCOPE:
                packed = bytes.fromhex(address)
                found.append(socket.inet_ntop(socket.AF_INET6, packed))
    return [a for a in dict.fromkeys(found) if not a.startswith("127.")]


class Answer(enum.Enum):
    """What became of an attempt to connect."""

    OPEN = "takes connections"
    REFUSED = "refuses connections"
    SILENT = "does not answer"
    UNKNOWN = (
        "has a name that this machine can't resolve: use an address, or add "
        "the name to DNS or /etc/hosts"
    )


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
    else, such as a host that is down.
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
    except socket.gaierror:
        return Answer.UNKNOWN
    except OSError:
        return Answer.SILENT
    return Answer.OPEN
