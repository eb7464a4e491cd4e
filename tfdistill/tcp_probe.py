"""Asks, by nothing but a TCP connection, whether a task listens."""

import enum
import socket

_CONNECT_SECS = 2.0


class Answer(enum.Enum):
    """What became of an attempt to connect."""

    OPEN = "takes connections"
    REFUSED = "refuses connections"
    SILENT = "does not answer"


def ask(address: str, *, timeout_secs: float = _CONNECT_SECS) -> Answer:
    """Connects to an address and hangs up.

    Args:
        address: `host:port`.
        timeout_secs: Longest wait in seconds. Default 2.

    Returns:
        `OPEN` if somebody listens, `REFUSED` if the host is there and nobody
        does, `SILENT` for all else, such as a host that is down or unknown.
    """
    host, _, port = address.rpartition(":")
    peer = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(peer, timeout=timeout_secs) as connection:
            # Where nobody listens on a port that the kernel also hands out,
            # a connection may by chance meet itself.
            if connection.getsockname() == connection.getpeername():
                return Answer.REFUSED
    except ConnectionRefusedError:
        return Answer.REFUSED
    except OSError:
        return Answer.SILENT
    return Answer.OPEN
