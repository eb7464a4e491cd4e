"""The last line of a group's logs that says what went wrong."""

import os
import pathlib
import re
from typing import NamedTuple

from tfdistill import plain_text

_TAIL_BYTES = 65536
# How Python ends a traceback, how its command lines report wrong options, and
# how the library and its programs say that they end.
_ERROR = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)(?:: .*)?"
    r"|[^\s:][^:]{0,80}: error: .*"
    r"|Fatal Python error: .*"
    r"|(?:Segmentation fault|Killed|Aborted|Bus error).{0,20}"
)
# Where a launcher has started the task again.
_RESTART = re.compile(r"===== .*: start [0-9]+ of the group =====")


class LogError(NamedTuple):
    """A line of a log.

    Attributes:
        log: Name of the file.
        text: The line.
        modified: When the file was last written to, in Unix seconds.
        ends_it: Whether little follows it in the log.
    """

    log: str
    text: str
    modified: float
    ends_it: bool


def find(logs: list[pathlib.Path]) -> LogError | None:
    """Returns the last error in the log that was written to last.

    Args:
        logs: Files; one that cannot be read is left out.
    """
    dated = []
    for path in logs:
        try:
            dated.append((path.stat().st_mtime, path))
        except OSError:
            continue
    for modified, path in sorted(dated, reverse=True):
        found = _last(path)
        if found is not None:
            text, ends_it = found
            return LogError(path.name, text, modified, ends_it)
    return None


def _last(path: pathlib.Path) -> tuple[str, bool] | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for age, line in enumerate(reversed(lines)):
        if _RESTART.fullmatch(line):
            return None  # What is above has been dealt with.
        if _ERROR.fullmatch(line[:4096]):
            return plain_text.one_line(line), age < 3
    return None
