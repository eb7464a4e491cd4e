"""A run seen from outside: its record, its processes and its progress.

Reads /proc, so Linux only.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import signs
from tfdistill.exchange import signing
from tfdistill.status import directory
from tfdistill.system import processes
from tfdistill.system import untrusted


@dataclasses.dataclass(frozen=True)
class Process:
    """One process, past or present.

    Attributes:
        pid: Its id, which another process may get after its end.
        started: When it began, in clock ticks since boot.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        found = processes.status_of(self.pid)
        return (
            found is not None
            and found.started == self.started
            and found.is_alive
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        found = processes.status_of(self.pid)
        return self.alive and found is not None and found.state == "T"

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal; returns False if the process is gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def find(pid: int) -> Process | None:
    """Returns the process with an id, or None if there is none."""
    found = processes.status_of(pid)
    return Process(pid, found.started) if found else None


def with_variable(name: str, value: str) -> Iterator[Process]:
    """Yields the living processes started with a variable of this value.

    Args:
        name: Of the environment variable.
        value: Its whole value.
    """
    wanted = f"{name}={value}".encode()
    for entry in processes.PROC.iterdir():
        if not entry.name.isdigit():
            continue
        # Processes end while they are looked at; others are not ours to read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = find(int(entry.name))
                if process is not None and process.alive:
                    yield process


def _process(entry: Mapping[str, int] | None) -> Process | None:
    return Process(entry["pid"], entry["started"]) if entry else None


class NoRunError(ValueError):
    """There is no run at work in the directory."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the run as it is now.

    Attributes:
        name: Such as `group_0_worker_1`.
        group: Index of its group.
        process: What it runs as.
    """

    name: str
    group: int
    process: Process


class RunView:
    """Reads launch.json and what the groups write, over and over."""

    def __init__(self, workdir: str) -> None:
        """Reads the record of the run.

        Args:
            workdir: The run's.

        Raises:
            NoRunError: If no run is at work there.
        """
        self.workdir = pathlib.Path(workdir).resolve()
        self._path = self.workdir / directory.RECORD
        try:
            record = json.loads(self._path.read_bytes())
            self.topology: dict[str, Any] = record["topology"]
            self._pids: Mapping[str, int] = record["pids"]
            self.launcher = _process(record.get("launcher"))
        except (OSError, ValueError, KeyError) as cause:
            raise NoRunError(
                f"`--workdir` must be of a run of launch.local; {self._path} "
                f"cannot be read: {cause}. Start the run first."
            ) from cause
        self.num_groups = int(self.topology["num_groups"])
        self._metrics = [
            untrusted.Tail(self.group_dir(g) / "metrics.jsonl")
            for g in range(self.num_groups)
        ]
        self._events = untrusted.Tail(self.workdir / "logs" / "events.jsonl")
        # Every process that was a task of the run since this view was made.
        self.seen: dict[Process, str] = {}
        if not self.tasks():
            raise NoRunError(
                f"`--workdir` must be of a run at work; none of the "
                f"{len(self._pids)} processes in {self._path} is alive. Start "
                "the run first."
            )

    @property
    def exchange(self) -> str:
        """The run's exchange."""
        given = self.topology["exchange"]
        return given or str(self.workdir / "exchange")

    @property
    def key(self) -> signing.KeyOption:
        """What the run's versions are signed with."""
        path = self.workdir / "exchange.key"
        if signing.has_key(os.environ) or not path.exists():
            return "environment"
        return path.read_bytes().strip()

    def group_dir(self, group: int) -> pathlib.Path:
        """Returns the directory of a group's files."""
        return self.workdir / f"group_{group}"

    def tasks(self, group: int | None = None) -> list[Task]:
        """Returns the tasks that are alive now.

        Args:
            group: Of this group only. Default: of all.
        """
        found = []
        try:
            self._pids = json.loads(self._path.read_bytes())["pids"]
        except (OSError, ValueError, KeyError):
            pass  # What was read before is still good.
        for name, pid in self._pids.items():
            process = find(pid)
            if process is None or not process.alive:
                continue
            task = Task(name, int(name.split("_")[1]), process)
            self.seen.setdefault(process, name)
            if group is None or task.group == group:
                found.append(task)
        return found

    def chief(self, group: int) -> Task | None:
        """Returns a group's chief, if it is alive."""
        name = f"group_{self._chief_of(group)}"
        return next((t for t in self.tasks(group) if t.name == name), None)

    def beat(self, group: int) -> int | None:
        """Returns how often a group's chief has got on; None if unknown."""
        ready = self.workdir / "logs" / "ready" / self._chief_of(group)
        line = signs.read_progress(ready)
        return line.count if line else None

    def _chief_of(self, group: int) -> str:
        kind = "chief" if self.topology["ps_per_group"] else "worker"
        return f"{group}_{kind}_0"

    def metrics(self, group: int) -> list[dict[str, Any]]:
        """Returns what a group has logged since the last call."""
        return self._metrics[group].read()

    def events(self) -> list[dict[str, Any]]:
        """Returns what the launcher has logged since the last call."""
        return self._events.read()

    def left_behind(self, within_secs: float) -> dict[str, int]:
        """Returns the replaced tasks that are still alive after a time.

        Args:
            within_secs: How long they may take to end.
        """
        deadline = time.monotonic() + within_secs
        while True:
            current = {task.process for task in self.tasks()}
            left = {
                name: process.pid
                for process, name in self.seen.items()
                if process not in current and process.alive
            }
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.1)
