"""What the logs of tasks say: the last error, and each warning once."""

import os
import pathlib
import re
from collections.abc import Callable
from collections.abc import Iterable
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
# Where a launcher has started the task again.
_RESTART = re.compile(r"===== .*: start [0-9]+ of the group =====")


class LogError(NamedTuple):
    """A line of a log; `ends_it` if little follows it."""

    log: str
    text: str
    modified: float
    ends_it: bool


def last_error(logs: list[pathlib.Path]) -> LogError | None:
    """Returns the last error in the newest log that has one."""
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


def tail(path: pathlib.Path, num_bytes: int) -> str:
    """Returns the end of a log as text; an OSError if it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read(num_bytes).decode("utf-8", errors="replace")


def _last(path: pathlib.Path) -> tuple[str, bool] | None:
    try:
        text = tail(path, _TAIL_BYTES)
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for age, line in enumerate(reversed(lines)):
        if _RESTART.fullmatch(line):
            return None  # What is above has been dealt with.
        if _ERROR.fullmatch(line[:4096]):
            return untrusted.one_line(line), age < 3
    return None


# As Python's `warnings` module writes them, as `logging` does with its own
# format, and as absl does; not those of TensorFlow's C++ code.
_FORMS = (
    re.compile(r"\S[^\n]{0,400}?:[0-9]+: (?:\w+\.)*(\w*Warning): (?P<text>.+)"),
    re.compile(r"WARNING:[\w.]+:(?P<text>.+)"),
    re.compile(r"W[0-9]{4} [0-9:.]+ +[0-9]+ [^ ]+\.py:[0-9]+\] (?P<text>.+)"),
)
# For the authors of code, not for those who run it.
_FOR_DEVELOPERS = (
    "BytesWarning",
    "DeprecationWarning",
    "ImportWarning",
    "PendingDeprecationWarning",
    "ResourceWarning",
    "SyntaxWarning",
)
# Numbers, and digests: the same fault of another step is no other warning.
_NUMBER = re.compile(r"\b[0-9a-f]*[0-9][0-9a-f]*\b")
_MOST = 20
_MORE = "there are further warnings in the logs"
# Of a log that is longer, what lies between is passed over.
_FIRST_BYTES, _LAST_BYTES = 2**20, 2**22


class LogWarnings:
    """Follows the logs of one group.

    Attributes:
        found: The warnings so far, each with the log in which it was first.
    """

    def __init__(self, logs: Callable[[], Iterable[pathlib.Path]]) -> None:
        """Reads nothing yet; `logs` returns the files that are there."""
        self.found: list[str] = []
        self._logs = logs
        self._offsets: dict[pathlib.Path, int] = {}
        self._gists: set[str] = set()

    def read(self) -> None:
        """Takes in what the logs have gained."""
        for path in self._logs():
            try:
                lines = self._new_lines(path)
            except OSError:
                continue  # It is gone, or will be readable again.
            for line in lines:
                # Most are not, and the forms take their time.
                if "Warning: " in line or "WARNING:" in line or line[:1] == "W":
                    self._take(line, path.name)

    def _new_lines(self, path: pathlib.Path) -> list[str]:
        offset = self._offsets.get(path, 0)
        size = path.stat().st_size
        if size < offset:
            offset = 0
        if size == offset:
            return []
        with path.open("rb") as file:
            file.seek(offset)
            if size - offset <= _FIRST_BYTES + _LAST_BYTES:
                data = file.read(size - offset)
            else:
                data = file.read(_FIRST_BYTES) + b"\n"
                file.seek(size - _LAST_BYTES)
                data += file.read(_LAST_BYTES)
        # What follows the last line break is still being written.
        whole, _, rest = data.rpartition(b"\n")
        self._offsets[path] = size - min(len(rest), _LAST_BYTES // 2)
        return whole.decode("utf-8", errors="replace").split("\n")

    def _take(self, line: str, log: str) -> None:
        if len(self._gists) > _MOST:
            return
        text = text_of(line)
        gist = _NUMBER.sub("", text or "")
        if text is None or gist in self._gists:
            return
        self._gists.add(gist)
        full = len(self._gists) > _MOST
        self.found.append(_MORE if full else f"{text} ({log})")


def text_of(line: str) -> str | None:
    """Returns the text of a line of a log that is a warning, else None.

    Example:
        >>> text_of("train.py:7: UserWarning: no labels")
        'no labels'
        >>> text_of("WARNING:tfdistill.data:too few"), text_of("loss 3")
        ('too few', None)
    """
    # What was overwritten in place, as progress bars are, was not kept.
    line = line.rstrip("\r").rpartition("\r")[2]
    for form in _FORMS:
        match = form.fullmatch(line[:4096])
        if match is None:
            continue
        if form.groups > 1 and match[1] in _FOR_DEVELOPERS:
            return None
        return untrusted.one_line(match["text"])
    return None
