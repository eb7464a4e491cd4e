"""What a process was at when it crashed, for its next start to know.

A fault inside C++ ends a process before Python can say a word. So Python's
fault handler writes into a file while something risky is going on. It writes
nothing if the process is killed from outside: that is nobody's fault.
"""

import contextlib
import faulthandler
import json
import pathlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import IO

from tfdistill.system import untrusted

_MAX_BYTES = 1024**2
_MAX_CRASHES = 100
_CURRENT = re.compile(rb"^Current thread 0x([0-9a-f]+)", re.MULTILINE)


class CrashNote:
    """One process's note, in a file of its own; without a path, none."""

    def __init__(self, path: pathlib.Path | None) -> None:
        """Reads what earlier starts have left in the file."""
        self._path = path
        self._lock = threading.Lock()
        self.crashed = self._found()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Notes `what` for the time of the block, best effort.

        Only one thread at a time can: others go on without.
        """
        if self._path is None or not self._lock.acquire(blocking=False):
            yield
            return
        try:
            file = self._begin(what)
            try:
                yield
            finally:
                if file is not None:
                    self._end(file)
        finally:
            self._lock.release()

    def _begin(self, what: str) -> IO[bytes] | None:
        try:
            file = self._write(what)
        except OSError:
            return None
        self._was_on = faulthandler.is_enabled()
        faulthandler.enable(file)
        return file

    def _end(self, file: IO[bytes]) -> None:
        faulthandler.disable()
        if self._was_on and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        file.close()
        with contextlib.suppress(OSError):
            if self.crashed:
                self._write("").close()
            elif self._path is not None:
                self._path.unlink()

    def _write(self, what: str) -> IO[bytes]:
        path = self._path or pathlib.Path()
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {
            "now": what,
            "thread": threading.get_ident(),
            "crashed": self.crashed[-_MAX_CRASHES:],
        }
        file = path.open("wb", buffering=0)
        file.write(json.dumps(note).encode() + b"\n")
        return file

    def _found(self) -> list[str]:
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_BYTES)
        except OSError:
            return []
        header, _, dump = text.partition(b"\n")
        note = untrusted.json_object(header) or {}
        crashed = note.get("crashed")
        found = [str(c) for c in crashed] if isinstance(crashed, list) else []
        # Another thread's fault says nothing of what this one was at.
        thread = _CURRENT.search(dump)
        if (
            note.get("now")
            and thread
            and int(thread[1], 16) == (untrusted.whole(note.get("thread")))
        ):
            found.append(str(note["now"]))
        return found
