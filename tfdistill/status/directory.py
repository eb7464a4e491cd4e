"""The files of a run: where they lie, and what launch.json records.

Whatever launched the run keeps to these names. The files may have been written
on another machine.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from tfdistill.status import run_events
from tfdistill.system import processes
from tfdistill.system import run_files
from tfdistill.system import untrusted

RECORD = "launch.json"
_MAX_RECORD_BYTES = 16 * 1024 * 1024
_MAX_GROUPS = 10_000
_LOG = re.compile(r"(group_[0-9]+)_[a-z]+_[0-9]+\.log")
_EVENTS = re.compile(r"events_(group_[0-9]+)\.jsonl")


class RunDirectory:
    """The directory of a run. Nothing in it need be there.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def events(self) -> list[pathlib.Path]:
        """Returns the files of its launchers' events, there or not."""
        logs = self.path / "logs"
        groups = [run_events.group_path(logs, group) for group in self.groups()]
        return [logs / run_events.NAME, *groups]

    def metrics(self, group: int) -> pathlib.Path:
        """Returns the file of a group's metrics."""
        return self.path / run_files.group_name(group) / run_files.METRICS

    def has_results(self, group: int) -> bool:
        """Whether a group of a recipe has written its last file."""
        directory = self.path / run_files.group_name(group)
        return (directory / "results.json").exists()

    def groups(self) -> set[int]:
        """Returns the groups that have a directory or a log."""
        logs = _names(self.path / "logs")
        found = {_group_of(log) for log in logs}
        found.update(map(run_files.group_of, _names(self.path)))
        return {group for group in found if group is not None}

    def logs(self, group: int) -> list[pathlib.Path]:
        """Returns the logs of a group's tasks, but not of earlier runs."""
        directory = self.path / "logs"
        return [
            directory / name
            for name in sorted(_names(directory))
            if _LOG.fullmatch(name) and _group_of(name) == group
        ]

    def last_written(self, group: int) -> float:
        """Returns when its metrics or logs last grew, in Unix seconds; or 0."""
        times = [0.0]
        for path in (self.metrics(group), *self.logs(group)):
            try:
                times.append(path.stat().st_mtime)
            except OSError:
                continue
        return max(times)


def _group_of(name: str) -> int | None:
    match = _LOG.fullmatch(name) or _EVENTS.fullmatch(name)
    return run_files.group_of(match[1]) if match else None


def _names(directory: pathlib.Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch; missing and malformed values of the file are left out.

    Attributes:
        num_groups: Groups that were launched; 0 if not known.
        exchange: Directory or URL of the exchange, or None.
        host: Name of the launcher's machine; may be empty.
        machine: See `processes.machine`; may be empty.
        processes: Id and start of each task's process, by the task's name.
        launcher: Id and start of the launcher's process, or None.
    """

    num_groups: int = 0
    exchange: str | None = None
    host: str = ""
    machine: str = ""
    processes: Mapping[str, tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )
    launcher: tuple[int, int] | None = None

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process ids mean something here."""
        return bool(self.machine) and self.machine == processes.machine()

    @property
    def launcher_has_ended(self) -> bool | None:
        """Whether the launcher is gone; None if unknown."""
        if not self.is_of_this_machine or self.launcher is None:
            return None
        pid, started = self.launcher
        return processes.has_ended(pid, started=started)

    def num_alive(self, group: int) -> int | None:
        """Returns how many tasks of a group live; None if unknown."""
        found = [
            process
            for name, process in self.processes.items()
            if name.startswith(f"{run_files.group_name(group)}_")
        ]
        if not self.is_of_this_machine or not found:
            return None
        return sum(
            not processes.has_ended(pid, started=started)
            for pid, started in found
        )


def read_record(path: pathlib.Path) -> LaunchRecord | None:
    """Reads launch.json, or returns None if there is none.

    OSError if it cannot be read; ValueError if it holds no JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_RECORD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it must hold a JSON object")
    topology = _mapping(found.get("topology"))
    starts = _mapping(found.get("task_starts"))
    launcher = _mapping(found.get("launcher"))
    num_groups = _count(topology.get("num_groups")) or 0
    return LaunchRecord(
        num_groups=min(num_groups, _MAX_GROUPS),
        exchange=_text(topology.get("exchange")) or None,
        host=_text(found.get("host")),
        machine=_text(found.get("machine")),
        processes={
            str(name): (number, started)
            for name, pid in _mapping(found.get("pids")).items()
            if (number := _count(pid)) and (started := _count(starts.get(name)))
        },
        launcher=_process(launcher.get("pid"), launcher.get("started")),
    )


def _process(pid: Any, started: Any) -> tuple[int, int] | None:
    found = (_count(pid), _count(started))
    return (found[0], found[1]) if found[0] and found[1] else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    # Process ids of 0 and below stand for groups of processes.
    found = untrusted.whole(value)
    return found if found is not None and found > 0 else None
