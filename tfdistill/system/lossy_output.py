"""Output that loses lines, and nothing else, while its disk is full."""

import contextlib
import errno
import io
import sys
from typing import Any
from typing import TextIO

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Lossy(io.FileIO):
    """A file that drops what it has no room for."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return memoryview(data).nbytes


def install() -> None:
    """Lets no `print` of this process fail because a disk is full."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    is_own = stream in (sys.__stdout__, sys.__stderr__)
    if not (is_own and isinstance(stream, io.TextIOWrapper)):
        return stream  # Another program's, such as a notebook's.
    with contextlib.suppress(OSError):
        stream.flush()
    raw: Any = _Lossy(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    found: Any = io.TextIOWrapper(
        # As Python does it, which with -u has no buffer.
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    found.mode = stream.mode
    return found
