"""Where the files of a run lie, and which groups have any.

Whatever launched the run keeps to these names.
"""

import os
import pathlib
import re

from tfdistill.status import run_events

_GROUP = re.compile(r"group_(0|[1-9][0-9]{0,5})")
_LOG = re.compile(r"group_(0|[1-9][0-9]{0,5})_[a-z]+_[0-9]+\.log")
_EVENTS = re.compile(r"events_group_(0|[1-9][0-9]{0,5})\.jsonl")


class RunDirectory:
    """The directory of a run. Nothing in it need be there.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Touches no storage.

        Args:
            path: The directory.
        """
        self.path = pathlib.Path(path)

    def events(self) -> list[pathlib.Path]:
        """Returns the files of its launchers' events, there or not."""
        logs = self.path / "logs"
        groups = [run_events.group_path(logs, group) for group in self.groups()]
        return [logs / run_events.NAME, *groups]

    def metrics(self, group: int) -> pathlib.Path:
        """Returns the file of a group's metrics."""
        return self.path / f"group_{group}" / "metrics.jsonl"

    def has_results(self, group: int) -> bool:
        """Whether a group of a recipe has written its last file."""
        return (self.path / f"group_{group}" / "results.json").exists()

    def groups(self) -> set[int]:
        """Returns the groups that have a directory or a log."""
        found = set()
        for directory, pattern in (
            (self.path, _GROUP),
            (self.path / "logs", _LOG),
            (self.path / "logs", _EVENTS),
        ):
            matches = (pattern.fullmatch(name) for name in _names(directory))
            found |= {int(match[1]) for match in matches if match}
        return found

    def logs(self, group: int) -> list[pathlib.Path]:
        """Returns the logs of a group's tasks, but for those of earlier runs.

        Args:
            group: Its index.
        """
        directory = self.path / "logs"
        return [
            directory / name
            for name in sorted(_names(directory))
            if (match := _LOG.fullmatch(name)) and int(match[1]) == group
        ]

    def last_written(self, group: int) -> float:
        """Returns when its metrics or logs last grew, in Unix seconds.

        Args:
            group: Its index.

        Returns:
            The time by the storage's clock; 0 where there is no such file.
        """
        times = [0.0]
        for path in (self.metrics(group), *self.logs(group)):
            try:
                times.append(path.stat().st_mtime)
            except OSError:
                continue
        return max(times)


def _names(directory: pathlib.Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
