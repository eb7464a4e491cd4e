"""A run seen from outside: its record, its processes and its progress."""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tfdistill.exchange import signing
from tfdistill.status import directory
from tfdistill.status import run_events
from tfdistill.system import run_files
from tfdistill.system import untrusted


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(workdir: pathlib.Path) -> Iterator[psutil.Process]:
    """Yields the living processes of a run's tasks, orphans too.

    They write the tasks' logs. A fork's environment is not to be seen.
    """
    for process in psutil.process_iter():
        # Processes end while they are looked at; others are not ours to read.
        with contextlib.suppress(OSError, psutil.Error):
            output = pathlib.Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if output.parent == workdir / "logs" and is_alive(process):
                yield process


class NoRunError(ValueError):
    """There is no run at work in the directory."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the run as it is now.

    Attributes:
        name: Such as `group_0_worker_1`.
        process: What it runs as.
    """

    name: str
    process: psutil.Process


class RunView:
    """Reads what the launcher and the groups write, over and over."""

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
        except (OSError, ValueError, KeyError) as cause:
            raise NoRunError(
                f"`--workdir` must be of a run of launch.local; {self._path} "
                f"cannot be read: {cause}. Start the run first."
            ) from cause
        self.num_groups = int(self.topology["num_groups"])
        self._metrics = [
            untrusted.Tail(self.group_dir(g) / run_files.METRICS)
            for g in range(self.num_groups)
        ]
        self._events_path = self.workdir / "logs" / run_events.NAME
        self._events = untrusted.Tail(self._events_path)
        # Every process that was a task of the run since this view was made.
        self._seen: dict[psutil.Process, str] = {}
        if not self.tasks():
            raise NoRunError(
                f"`--workdir` must be of a run at work; no process that "
                f"{self._events_path} names is alive. Start the run first."
            )

    @property
    def exchange(self) -> str:
        """The run's exchange."""
        return self.topology["exchange"] or str(self.workdir / "exchange")

    @property
    def key(self) -> signing.KeyOption:
        """What the run's versions are signed with."""
        path = self.workdir / "exchange.key"
        if signing.has_key(os.environ) or not path.exists():
            return "environment"
        return path.read_bytes().strip()

    def group_dir(self, group: int) -> pathlib.Path:
        """Returns the directory of a group's files."""
        return self.workdir / run_files.group_name(group)

    def tasks(self, group: int | None = None) -> list[Task]:
        """Returns the tasks that are alive now, of one group or of all."""
        events = run_events.read(self._events_path)
        pids = {e["task"]: e["pid"] for e in events if e["event"] == "start"}
        found = []
        for name, pid in sorted(pids.items()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if is_alive(process):
                    self._seen.setdefault(process, name)
                    if group in (None, int(name.split("_")[1])):
                        found.append(Task(name, process))
        return found

    def chief(self, group: int) -> Task | None:
        """Returns a group's chief, if it is alive."""
        kind = "chief" if self.topology["ps_per_group"] else "worker"
        name = f"group_{group}_{kind}_0"
        return next((t for t in self.tasks(group) if t.name == name), None)

    def metrics(self, group: int) -> list[dict[str, Any]]:
        """Returns what a group has logged since the last call."""
        return self._metrics[group].read()

    def events(self) -> list[dict[str, Any]]:
        """Returns what the launcher has logged since the last call."""
        return self._events.read()

    def left_behind(self, within_secs: float) -> dict[str, int]:
        """Returns the replaced tasks that are still alive after a time."""
        deadline = time.monotonic() + within_secs
        while True:
            current = {task.process for task in self.tasks()}
            left = {
                name: process.pid
                for process, name in self._seen.items()
                if process not in current and is_alive(process)
            }
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.1)
