"""JSON that others wrote, read with distrust: lines of sockets, and values."""

import json
import math
import socket
import time
from typing import Any

_LINE_BYTES = 4096
# What the programs of other languages, too, take for a whole number.
_MAX_WHOLE = 2**63


def number(value: Any) -> float | None:
    """Returns a finite number as a float, or None for anything else.

    Args:
        value: What JSON held.

    Example:
        >>> number(3), number(True), number("3"), number(float("nan"))
        (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def whole(value: Any) -> int | None:
    """Returns a whole number of 64 bits, or None for anything else.

    Args:
        value: What JSON held.

    Example:
        >>> whole(-3), whole(True), whole(3.0), whole(10**30)
        (-3, None, None, None)
    """
    if type(value) is int and -_MAX_WHOLE <= value < _MAX_WHOLE:
        return value
    return None


def receive(
    connection: socket.socket, *, limit_secs: float
) -> dict[str, Any] | None:
    """Reads one line that holds a JSON object, whoever sent it.

    Args:
        connection: Where the line comes from.
        limit_secs: Longest wait for the whole line, in seconds.

    Returns:
        The object; None for anything else, and if no whole line came in time.
    """
    deadline = time.monotonic() + limit_secs
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < _LINE_BYTES:
            remaining_secs = deadline - time.monotonic()
            if remaining_secs <= 0:
                return None
            connection.settimeout(remaining_secs)
            block = connection.recv(_LINE_BYTES)
            if not block:
                return None
            received += block
        message = json.loads(received)
    # UTF-8 and the digits of a number raise ValueError; depth, RecursionError.
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
