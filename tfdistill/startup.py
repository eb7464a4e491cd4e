"""How a task tells its launcher that it has started, and who is missing.

A task creates two files beside its log: one when it begins to wait for the
other tasks of its group and one when they are all connected; and a third if it
cannot listen on its address. Their names come from `TFDISTILL_READY_FILE`;
without it (another launcher) nothing is written.
"""

import os
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence

VARIABLE = "TFDISTILL_READY_FILE"
_STARTING = ".starting"
_PORT_TAKEN = ".port_taken"
SUFFIXES = ("", _STARTING, _PORT_TAKEN)


def announce_starting(environ: Mapping[str, str] | None = None) -> None:
    """Says that this task is there and waits for its group.

    Args:
        environ: Variables to read. Default `os.environ`.
    """
    _touch(environ, _STARTING)


def announce_ready(environ: Mapping[str, str] | None = None) -> None:
    """Says that all tasks of this group are connected.

    Args:
        environ: Variables to read. Default `os.environ`.
    """
    _touch(environ, _STARTING)
    _touch(environ, "")


def announce_port_taken(environ: Mapping[str, str] | None = None) -> None:
    """Says that another process listens on this task's address.

    Args:
        environ: Variables to read. Default `os.environ`.
    """
    _touch(environ, _PORT_TAKEN)


def found_port_taken(ready_path: pathlib.Path) -> bool:
    """Whether a task has said so.

    Args:
        ready_path: The task's ready file.
    """
    return ready_path.with_name(ready_path.name + _PORT_TAKEN).exists()


def _touch(environ: Mapping[str, str] | None, suffix: str) -> None:
    environ = os.environ if environ is None else environ
    path = environ.get(VARIABLE)
    if path:
        pathlib.Path(path + suffix).touch()


class StartWatch:
    """Judges whether the tasks of one group start within the time limit.

    The limit applies twice: from the launch until the first task appears, and
    from then until all are connected. Tasks that have ended are not waited
    for. Times are seconds of any one clock, passed in.
    """

    def __init__(
        self,
        ready_files: Mapping[str, pathlib.Path],
        *,
        limit_secs: float,
        now: float,
    ) -> None:
        """Starts the clock.

        Args:
            ready_files: Path that each task, by name, creates when ready.
            limit_secs: The limit; 0 means there is none.
            now: Time of the launch.
        """
        self._ready_files = dict(ready_files)
        self._limit_secs = limit_secs
        self._launch = now
        self._appeared: float | None = None
        self._over = limit_secs == 0
        self._warned = False

    def late(self, running: Sequence[str], *, now: float) -> str | None:
        """Returns what to tell the user once a limit has passed, else None.

        Args:
            running: Names of the tasks that have not ended.
            now: The present time.
        """
        if self._over or not running:
            return None
        waited_for = [n for n in running if not self._ready_files[n].exists()]
        if not waited_for:
            self._over = True
            return None
        absent = [n for n in waited_for if not self._has_appeared(n)]
        if self._appeared is None and any(
            self._has_appeared(name) for name in self._ready_files
        ):
            self._appeared = now
        since = self._launch if self._appeared is None else self._appeared
        if now - since < self._limit_secs:
            return None
        self._over = True
        if absent:
            return self._message(absent, "did not appear")
        return self._message(waited_for, "appeared but did not connect")

    def warning(self, *, now: float) -> str | None:
        """Returns a warning, once, at half the limit with no task in sight."""
        half = self._launch + self._limit_secs / 2
        if self._over or self._warned or self._appeared is not None:
            return None
        if now < half:
            return None
        self._warned = True
        return (
            "no task has reached tfdistill.make_strategy yet; the group will "
            f"be stopped {self._limit_secs:g} s after its launch. For a "
            "script that does not use tfdistill pass --start_timeout_secs=0."
        )

    def _has_appeared(self, name: str) -> bool:
        path = self._ready_files[name]
        return path.exists() or path.with_name(path.name + _STARTING).exists()

    def _message(self, names: Sequence[str], what: str) -> str:
        return (
            f"{', '.join(names)} {what} within {self._limit_secs:g} s. Look "
            "at the log; raise --start_timeout_secs if start-up is slow, or "
            "set it to 0 for a script that never calls "
            "tfdistill.make_strategy."
        )
