"""Turns what processes have come to into events, each told once."""

import pathlib
from collections.abc import Callable
from collections.abc import Mapping

from tfdistill import task_process


class ProcessNews:
    """Tells of the starts, readiness and ends of one group's tasks."""

    def __init__(
        self,
        ready_files: Mapping[str, pathlib.Path],
        *,
        note: Callable[..., None],
    ) -> None:
        """Has told nothing yet.

        Args:
            ready_files: Path that each task, by name, creates when ready.
            note: Takes an event, its task and details; see `run_events`.
        """
        self._ready_files = dict(ready_files)
        self._note = note
        # By event and process id, as a task may be started again.
        self._told: set[tuple[str, int | None]] = set()

    def tell(self, processes: Mapping[str, task_process.TaskProcess]) -> None:
        """Tells what is new.

        Args:
            processes: Those of the group, by name of the task.
        """
        for name, process in processes.items():
            pid, code = process.pid, process.exit_code
            if pid is not None and self._is_new("start", pid):
                self._note("start", task=name, pid=pid)
            # A check of the file only as long as it is of interest.
            if pid is not None and ("ready", pid) not in self._told:
                if self._ready_files[name].exists():
                    self._is_new("ready", pid)
                    self._note("ready", task=name)
            if code is not None and self._is_new("exit", pid):
                self._note("exit", task=name, exit_code=code)

    def _is_new(self, event: str, pid: int | None) -> bool:
        new = (event, pid) not in self._told
        self._told.add((event, pid))
        return new
