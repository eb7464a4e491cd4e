"""Finds the tasks of one group that are there and yet do nothing.

TensorFlow misses most of them: it takes ten seconds to note a frozen peer and
never notes one that hangs, and a coordinator waits for its workers and ps
without a limit. A task cannot watch itself either: what hangs may hold Python's
lock. So the launcher looks at its processes and at the progress they report.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdistill import awake_clock
from tfdistill import launched_task
from tfdistill import local_cluster
from tfdistill import progress
from tfdistill import progress_watch
from tfdistill import task_process

# A server says something twice a second, whatever the model. While one does
# not, its chief is not blamed for what may be the server's fault.
_SUSPICIOUS_SECS = 2.0
# The steps of a group stand still while a worker that was lost comes back.
_RETURN_SECS = 60.0
# Phases in which others may have to wait for a task for good reasons.
_FREE = frozenset({progress.IDLE, progress.CALLBACKS, progress.EPOCH_END})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of a task, or of a whole group.

    Attributes:
        event: Its name in `run_events`.
        task: Name of the task; None for the group.
        text: What to tell the user of a task that must be killed; else empty.
        details: What belongs to the event.
    """

    event: str
    task: str | None
    text: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TaskWatch:
    """Watches the tasks of one attempt to run a group."""

    def __init__(
        self,
        tasks: Mapping[str, launched_task.Task],
        *,
        topology: local_cluster.LocalCluster,
        clock: awake_clock.AwakeClock | None = None,
    ) -> None:
        """Starts the clock.

        Args:
            tasks: The tasks by name.
            topology: Holds the limits.
            clock: Measures silence. Default: a new one.
        """
        self._tasks = dict(tasks)
        self._frozen_secs = topology.frozen_secs
        self._clock = clock or awake_clock.AwakeClock()
        self._stopped: dict[str, float] = {}
        self._lost: dict[str, float] = {}
        servers = {
            name
            for name, task in tasks.items()
            if topology.ps_per_group and task.cluster.task_type != "chief"
        }
        self._trainers = [name for name in tasks if name not in servers]
        self._servers = sorted(servers)
        self._stuck_secs = topology.stuck_secs
        self._progress = {name: self._new_watch() for name in tasks}

    def _new_watch(self) -> progress_watch.ProgressWatch:
        return progress_watch.ProgressWatch(stuck_secs=self._stuck_secs)

    def note_end(self, name: str) -> None:
        """Takes in that a worker is gone, and will be started again."""
        self._stopped.pop(name, None)
        self._lost[name] = self._clock.read()
        self._progress[name] = self._new_watch()

    def look(
        self, processes: Mapping[str, task_process.TaskProcess]
    ) -> list[Finding]:
        """Returns what has become of the tasks since the last look.

        Args:
            processes: Those of the group, by name of the task.
        """
        now = self._clock.read()
        running = {n: p for n, p in processes.items() if p.exit_code is None}
        found = self._frozen(running, now)
        for name in running:
            line = progress.read(self._tasks[name].ready_path)
            self._progress[name].note(line, now=now)
        self._excuse(running, now)
        servers = [name for name in self._servers if name in running]
        stuck = [
            self._stuck(name, now)
            for name in servers
            if self._progress[name].is_stuck(now=now)
        ]
        suspicious = any(
            self._progress[name].phase == progress.SERVING
            and self._progress[name].silent_secs(now=now) > _SUSPICIOUS_SECS
            for name in servers
        )
        if not suspicious and any(
            self._progress[name].is_stuck(now=now)
            for name in self._trainers
            if name in running
        ):
            stuck.append(self._group_stuck(list(running), now))
        return found + stuck

    def _frozen(
        self, running: Mapping[str, task_process.TaskProcess], now: float
    ) -> list[Finding]:
        found = []
        for name, process in running.items():
            since = self._stopped.get(name)
            if not process.is_stopped:
                if self._stopped.pop(name, None) is not None:
                    found.append(Finding(event="continued", task=name))
            elif since is None:
                self._stopped[name] = now
                found.append(Finding(event="stopped_by_signal", task=name))
            elif self._frozen_secs and now - since >= self._frozen_secs:
                text = (
                    f"{name} was frozen: a signal had stopped it for "
                    f"{now - since:.1f} s (--frozen_secs), so it was killed"
                )
                found.append(
                    Finding(
                        event="frozen",
                        task=name,
                        text=text,
                        details={"silent_secs": now - since},
                    )
                )
        return found

    def _excuse(
        self, running: Mapping[str, task_process.TaskProcess], now: float
    ) -> None:
        """Forgives those who wait for a task that may take its time."""
        for name, since in list(self._lost.items()):
            here = self._progress[name].phase == progress.SERVING
            if now - since > _RETURN_SECS or (
                name in running and here and name not in self._stopped
            ):
                del self._lost[name]
        free = [
            name
            for name in self._trainers
            if self._progress[name].phase in _FREE
            and not self._progress[name].is_stuck(now=now)
        ]
        # One that is stopped will soon be killed, or is being debugged.
        free += [*self._lost, *self._stopped]
        for name in self._trainers:
            if any(other != name for other in free):
                self._progress[name].excuse(now=now)
        for name in self._stopped:
            self._progress[name].excuse(now=now)

    def _stuck(self, name: str, now: float) -> Finding:
        watch = self._progress[name]
        silent = watch.silent_secs(now=now)
        return Finding(
            event="stuck",
            task=name,
            details={"silent_secs": silent, "phase": watch.phase},
            text=f"{name} was stuck: it has said nothing for {silent:.1f} s "
            "(--stuck_secs), so it was killed",
        )

    def _group_stuck(self, running: list[str], now: float) -> Finding:
        silences = {
            name: self._progress[name].silent_secs(now=now)
            for name in self._trainers
            if name in running
        }
        said = ", ".join(
            f"{name} {secs:.1f} s ({self._progress[name].phase})"
            for name, secs in silences.items()
        )
        longest = max(silences, key=lambda name: silences[name])
        return Finding(
            event="stuck",
            task=None,
            details={
                "silent_secs": silences[longest],
                "phase": self._progress[longest].phase,
            },
            text=f"no progress, so it was killed; silent for: {said}. Steps "
            "that may take longer need a higher --stuck_secs (0 for none)",
        )
