"""A slow line to the other groups, to be tried out on one machine.

A launcher puts it between groups that share a directory. A group's own files
are at home: to write them costs nothing, and others fetch them over lines of
their own. The tasks of a group share one line, by a file with the time until
which it is taken. What is known of files comes along with their directory.
"""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping

from tfdistill.exchange import filesystem
from tfdistill.system import run_files

VARIABLE = "TFDISTILL_LINK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The line of a group; 0 Mbit/s are as many as there are."""

    mbit_per_s: float
    delay_ms: float
    group: int
    file: str

    def to_env(self) -> dict[str, str]:
        """Returns the variable by which a task's exchange finds it."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


class FarFiles(filesystem.LocalFileSystem):
    """An exchange's directory, in which other groups' files are far away.

    A file costs the delay once and its bytes, and a directory the delay.
    """

    def __init__(
        self,
        root: str,
        link: Link,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Takes the root of the exchange; all tasks have the same clock."""
        self._root, self._link = root, link
        self._clock, self._sleep = clock, sleep

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in the directory, which must not be a link."""
        self._ask(path)
        return super().list_dir(path)

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a regular file."""
        is_far = self._ask(path)
        for block in super().blocks(path):
            if is_far and self._link.mbit_per_s:
                self._carry(len(block))
            yield block

    def _ask(self, path: str) -> bool:
        """Waits for an answer if the path is another group's."""
        names = path.removeprefix(self._root).split("/")
        groups = {run_files.group_of(name) for name in names}
        is_far = bool(groups - {None, self._link.group})
        if is_far:
            self._sleep(self._link.delay_ms / 1e3)
        return is_far

    def _carry(self, num_bytes: int) -> None:
        """Waits for the line, and then until all is through."""
        with open(self._link.file, "a+b") as line:
            fcntl.flock(line, fcntl.LOCK_EX)
            line.seek(0)
            until = max(float(line.read() or 0), self._clock())
            until += num_bytes * 8e-6 / self._link.mbit_per_s
            line.truncate(0)
            line.write(repr(until).encode())
        self._sleep(max(0.0, until - self._clock()))


def before(
    file_system: filesystem.FileSystem,
    root: str,
    environ: Mapping[str, str] = os.environ,
) -> filesystem.FileSystem:
    """Returns what reads an exchange over the environment's line, if any."""
    text = environ.get(VARIABLE)
    is_local = isinstance(file_system, filesystem.LocalFileSystem)
    if not text or not is_local:
        return file_system
    return FarFiles(root, Link(**json.loads(text)))
