"""The last error in the logs of tasks."""

import contextlib
import os
import pathlib
import re
from typing import NamedTuple

from tfdistill.system import untrusted

_TAIL_BYTES = 65536
# How Python ends a traceback, how its command lines report wrong options, and
# how the library and its programs say that they end.
_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)(?:: .*)?"
    r"|[^\s:][^:]{0,80}: error: .*"
    r"|Fatal Python error: .*"
    r"|(?:Segmentation fault|Killed|Aborted|Bus error).{0,20}"
)
# What TensorFlow's C++ says at every start, on machines without GPUs too.
_NOISE = re.compile(
    r"[IW][0-9]{4} [0-9:. ]+ [\w.]+\.(?:cc|h):[0-9]+\] "
    r"|[0-9-]+ [0-9:.]+: [IW] (?:tensorflow|external)/"
    r"|WARNING: All log messages before absl::InitializeLog"
    r"|To enable the following instructions: "
    r"|E.* (?:cuda|cudnn|cufft|cublas)\w*\.cc:[0-9]+\] "
)
# Where a launcher has started the task again.
_RESTART = re.compile(r"===== .*: start [0-9]+ of the group =====")


class LogError(NamedTuple):
    """A line of a log; `ends_it` if little follows it."""

    log: str
    text: str
    ends_it: bool


def is_noise(line: str) -> bool:
    """Returns whether a line has nothing about the training itself.

    Example:
        >>> is_noise("I0000 00:00:17.5  12 grpc_server_lib.cc:467] Started")
        True
        >>> is_noise("W1125 07:40:11.1  12 model.py:30] No teacher")
        False
    """
    return _NOISE.match(line) is not None


def last_error(logs: list[pathlib.Path]) -> LogError | None:
    """Returns the last error in the newest log that has one."""
    dated = []
    for path in logs:
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    found = (_last(path) for _, path in sorted(dated, reverse=True))
    return next((error for error in found if error), None)


def tail(path: pathlib.Path, num_bytes: int) -> str:
    """Returns the end of a log as text; an OSError if it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read(num_bytes).decode("utf-8", errors="replace")


def _last(path: pathlib.Path) -> LogError | None:
    try:
        text = tail(path, _TAIL_BYTES)
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for age, line in enumerate(reversed(lines)):
        if _RESTART.fullmatch(line):
            return None  # The lines above have been dealt with.
        if _ERROR.fullmatch(line[:4096]):
            return LogError(path.name, untrusted.one_line(line), age < 3)
    return None
