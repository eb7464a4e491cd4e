"""Follows a file that grows by JSON objects, one a line, while others write."""

import json
import pathlib
from typing import Any


class Tail:
    """Reads the records that are appended to one file from now on."""

    def __init__(self, path: pathlib.Path, *, last_bytes: int = 0) -> None:
        """Remembers where the file ends now, if it exists.

        Args:
            path: File of JSON objects, one a line. It may appear later.
            last_bytes: How much of what is there now is read, too. Default 0.
        """
        self._path = path
        self._partial = b""
        self._inode, size = self._find()
        # What begins within a line is no JSON object, and is left out.
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
        return [record for line in lines if (record := _parse(line))]

    def _find(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
