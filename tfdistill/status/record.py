"""What launch.json tells of a run, to who may be on another machine."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdistill.system import processes
from tfdistill.system import untrusted

NAME = "launch.json"
_MAX_BYTES = 16 * 1024 * 1024
_MAX_GROUPS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch; what the file does not tell, or tells wrongly, is left out.

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
        """Whether the launcher is gone; None where nobody can tell."""
        if not self.is_of_this_machine or self.launcher is None:
            return None
        pid, started = self.launcher
        return processes.has_ended(pid, started=started)

    def num_alive(self, group: int) -> int | None:
        """Returns how many tasks of a group live; None where none can tell.

        Args:
            group: Its index.
        """
        found = [
            process
            for name, process in self.processes.items()
            if name.startswith(f"group_{group}_")
        ]
        if not self.is_of_this_machine or not found:
            return None
        return sum(
            not processes.has_ended(pid, started=started)
            for pid, started in found
        )


def read_record(path: pathlib.Path) -> LaunchRecord | None:
    """Reads launch.json, or returns None where there is none.

    Args:
        path: The file.

    Raises:
        OSError: It is there and cannot be read.
        ValueError: It is not JSON, or no object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES)
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
