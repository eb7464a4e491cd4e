"""The files of a run: where they lie, and what launch.json records.

Whatever launched the run keeps to these names. The files may have been written
on another machine.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import socket
from typing import Any

from tfdistill.status import run_events
from tfdistill.system import run_files

RECORD = "launch.json"
# In the logs' directory, locked by the launcher as long as it lives.
LOCK = "launcher.lock"
# A group's directory, a log of one of its tasks, its launcher's events; not the
# files of earlier runs, which have a number before their suffix.
_OF_GROUP = re.compile(
    r"(?:events_)?(group_[0-9]+)(?:_[a-z]+_[0-9]+\.log|\.jsonl)?"
)


class RunDirectory:
    """The directory of a run. Nothing in it need be there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def events(self) -> list[pathlib.Path]:
        """Returns the files of its launchers' events, there or not."""
        logs = self.path / "logs"
        groups = [run_events.group_path(logs, group) for group in self.groups()]
        return [logs / run_events.NAME, *groups]

    def is_abandoned(self, record: dict[str, Any] | None) -> bool:
        """Whether this machine's launcher of the run is known to be gone.

        Another machine's, or one that is not known, may live.
        """
        if not record or record.get("host") != socket.gethostname():
            return False
        try:
            with (self.path / "logs" / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def metrics(self, group: int) -> pathlib.Path:
        """Returns the file of a group's metrics."""
        return self.path / run_files.group_name(group) / run_files.METRICS

    def marks(self, group: int) -> pathlib.Path:
        """Returns the file of a group's marks, see `goodput`."""
        return self.path / run_files.group_name(group) / run_files.MARKS

    def groups(self) -> set[int]:
        """Returns the groups that have a directory, a log or events."""
        found = [*self._found("group_*"), *self._found("logs/*group_*")]
        groups = {_group_of(path.name) for path in found}
        return {group for group in groups if group is not None}

    def logs(self, group: int) -> list[pathlib.Path]:
        """Returns the logs of a group's tasks, but not of earlier runs."""
        found = self._found(f"logs/{run_files.group_name(group)}_*.log")
        return sorted(path for path in found if _group_of(path.name) == group)

    def last_written(self, group: int) -> float:
        """Returns when its metrics or logs last grew, in Unix seconds; or 0."""
        times = [0.0]
        for path in (self.metrics(group), *self.logs(group)):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def _found(self, pattern: str) -> list[pathlib.Path]:
        """The paths that match; none on a disk that is gone or fails."""
        try:
            return list(self.path.glob(pattern))
        except OSError:
            return []


def _group_of(name: str) -> int | None:
    match = _OF_GROUP.fullmatch(name)
    return run_files.group_of(match[1]) if match else None


def read_record(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads launch.json, or returns None if there is none.

    OSError if it cannot be read; ValueError if it holds no JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(found, dict):
        raise ValueError("it must hold a JSON object")
    return found
