"""What others wrote, read with distrust: text, JSON values, growing files."""

import json
import pathlib
import re
from typing import Any

# Colours and cursor movements; control characters other than tabs; what turns
# the direction of text; and halves of surrogate pairs, which JSON may hold and
# no stream can write.
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# More than a long line of metrics.
_END_BYTES = 65536


class BadMessageError(ValueError):
    """A message that must not be used; `kind` is what it is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def without_control(text: str) -> str:
    """Returns a line without what would steer a terminal, or break a stream.

    Example:
        >>> without_control("a" + chr(27) + "[31mb" + chr(7))
        'ab'
    """
    return _CONTROL.sub("", text)


def one_line(text: str, *, max_chars: int = 500) -> str:
    r"""Returns a text as one line of bounded length.

    Example:
        >>> one_line("it failed:\n  no such file", max_chars=18)
        'it failed: no s...'
    """
    text = without_control(" ".join(text[: 4 * max_chars].split()))
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Returns the object that JSON text holds, or None for anything else."""
    try:
        value = json.loads(text)
    # UTF-8 and the digits of a number raise ValueError; depth, RecursionError.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def last_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records that end a file, of its last 64 KiB; may be none."""
    return Tail(path, last_bytes=_END_BYTES).read()


class Tail:
    """Reads the records that are appended to one file from now on."""

    def __init__(self, path: pathlib.Path, *, last_bytes: int = 0) -> None:
        """Starts at the end of the file, or `last_bytes` before it.

        The file need not exist yet.
        """
        self._path = path
        self._partial = b""
        self._inode, size = self._find()
        # Text from within a line isn't a JSON object, and is left out.
        self._offset = max(0, size - last_bytes)

    def read(self) -> list[dict[str, Any]]:
        """Returns the records completed since the last call.

        Lines that are not JSON objects are left out: a task may have been
        killed in the middle of one.
        """
        inode, size = self._find()
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, self._partial = inode, 0, b""
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [record for line in lines if (record := json_object(line))]

    def _find(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size
