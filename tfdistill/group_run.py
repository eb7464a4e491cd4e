"""The tasks of one group while they run: what ended them, and what is left.

A task that fails ends its group, but for the workers of a group with parameter
servers: what a dead one has left undone, its coordinator gives to the others,
and once it is started again at its old address it takes part again.
"""

import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill import live_status
from tfdistill import local_cluster
from tfdistill import run_files
from tfdistill import startup
from tfdistill import task_process
from tfdistill import worker_restarts

# Worth another try, as for a task that lost its peers.
EXIT_RETRY = 75


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How one group ended.

    Attributes:
        group: Index of the group.
        state: `"done"`, `"failed"` or, if it was told to end, `"stopped"`.
        exit_codes: Exit code of each task by name; minus the signal's number
            for a task that a signal ended.
        failed_task: Name of the task that failed first, to which the failure
            of its peers is due; None if none failed by itself.
        reason: What happened, in words; empty for a group that is done.
        last_lines: The last lines of the failed task's log.
        restarts: How often each worker was started again, by name; of a group
            with parameter servers only.
    """

    group: int
    state: str
    exit_codes: Mapping[str, int | None]
    failed_task: str | None
    reason: str
    last_lines: tuple[str, ...]
    restarts: Mapping[str, int]


class GroupRun:
    """Supervises the processes of one group.

    Attributes:
        status: What is shown of the group.
        reason: Why the group ends or ended early; empty if it did not.
        exit_code: What the group makes the launcher's exit code; 0 if done.
        failed_task: Name of the task to blame, or None.
        failure_time: When it failed, by `time.monotonic()`; None if not.
    """

    def __init__(
        self,
        tasks: Sequence[local_cluster.Task],
        *,
        topology: local_cluster.LocalCluster,
    ) -> None:
        """Describes the group; `start` starts it."""
        self._tasks = {task.name: task for task in tasks}
        self._topology = topology
        self._processes: dict[str, task_process.TaskProcess] = {}
        workers = [
            task.name
            for task in tasks
            if topology.ps_per_group and task.cluster.task_type == "worker"
        ]
        self._restarts = worker_restarts.WorkerRestarts(
            workers, limit=topology.num_worker_restarts
        )
        self._watch: startup.StartWatch | None = None
        self._kill_time: float | None = None
        self._end_state: str | None = None
        group = tasks[0].cluster.group
        metrics = pathlib.Path(
            topology.workdir, f"group_{group}", "metrics.jsonl"
        )
        self._tail = live_status.MetricsTail(metrics)
        self.status = live_status.GroupStatus(group)
        self.reason = ""
        self.exit_code = 0
        self.failed_task: str | None = None
        self.failure_time: float | None = None

    def start(self) -> None:
        """Starts a process for each task."""
        for name in self._tasks:
            self._start(name)
        self._watch = startup.StartWatch(
            {name: task.ready_path for name, task in self._tasks.items()},
            limit_secs=self._topology.start_timeout_secs,
            now=time.monotonic(),
        )

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        # A task that is started again adds to its log; that of an earlier run
        # has another name by now.
        with task.log_path.open("ab") as log_file:
            self._processes[name] = task_process.TaskProcess(
                self._topology.command,
                env=task.environ(os.environ),
                log_file=log_file,
            )

    @property
    def processes(self) -> Mapping[str, task_process.TaskProcess]:
        """The processes started so far, by name of the task."""
        return self._processes

    @property
    def over(self) -> bool:
        """Whether no process of the group is left."""
        return all(process.closed for process in self._processes.values())

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns what to tell the user."""
        for process in self._processes.values():
            process.read()
        self.status.update(self._tail.read())
        now = time.monotonic()
        messages = []
        if self._end_state is None:
            messages = self._judge(now)
        elif self._kill_time is not None and now >= self._kill_time:
            self.kill()
        if self._end_state is None:
            self.status.state = "running" if self._runs() else "starting"
        else:
            ended = self.over or self._end_state == "done"
            self.status.state = self._end_state if ended else "stopping"
        return messages

    def _runs(self) -> bool:
        ready = any(task.ready_path.exists() for task in self._tasks.values())
        return ready or bool(self.status.record)

    def _judge(self, now: float) -> list[str]:
        failed = [
            (process.exit_time or now, name, process.exit_code)
            for name, process in self._processes.items()
            if process.exit_code and name not in self._restarts.made
        ]
        if failed:
            # The peers of a failed task fail too, so the earliest is to blame.
            when, name, code = min(failed)
            return self._blame(name, code, f"{name} {_describe(code)}", when)
        if self._has_finished():
            self._end_state = "done"
            self._request_stop(now)
            return []
        running = [n for n, p in self._processes.items() if p.exit_code is None]
        late = self._watch and self._watch.late(running, now=now)
        if late:
            self.exit_code, self.failure_time = EXIT_RETRY, now
            return self._fail(None, late, now)
        messages = self._mend(now)
        warning = self._watch and self._watch.warning(now=now)
        if warning and self._end_state is None:
            messages.append(f"group {self.status.group}: {warning}")
        return messages

    def _mend(self, now: float) -> list[str]:
        """Starts dead workers again, as far as they may."""
        messages: list[str] = []
        for name, made in self._restarts.made.items():
            code = self._processes[name].exit_code
            if code is None or self._restarts.is_known_dead(name):
                continue
            limit = self._restarts.limit
            delay = self._restarts.note_end(name, now=now)
            what = f"{name} {_describe(code)}"
            if self._restarts.none_left:
                reason = (
                    f"{what}, and no worker is left: one has used up its "
                    f"{limit} restarts (--worker_restarts)"
                )
                return messages + self._blame(name, code, reason, now)
            if delay is None:
                plan = (
                    "no worker is started again any more, as one has used up "
                    f"its {limit} restarts (--worker_restarts)"
                )
            else:
                plan = f"restart {made + 1} of {limit} in {delay:g} s"
            messages.append(f"group {self.status.group}: {what}; {plan}")
        for name in self._restarts.due(now=now):
            # Not before its keeper has ended all that it has started.
            if self._processes[name].closed:
                self._start(name)
                self._restarts.note_restart(name, now=now)
        return messages

    def _has_finished(self) -> bool:
        """Whether all is done: servers never end, so their chief decides."""
        return all(
            process.exit_code == 0
            for name, process in self._processes.items()
            if not self._topology.ps_per_group
            or self._tasks[name].cluster.task_type == "chief"
        )

    def _blame(
        self, name: str, code: int, reason: str, when: float
    ) -> list[str]:
        # A worker may end with 0 and yet be missed.
        self.exit_code = code if code > 0 else 128 - code if code else 1
        self.failure_time = when
        return self._fail(name, reason, time.monotonic())

    def _fail(self, name: str | None, reason: str, now: float) -> list[str]:
        self.failed_task, self.reason = name, reason
        self._end_state = "failed"
        self._request_stop(now)
        messages = [f"group {self.status.group} failed: {reason}"]
        if name is not None:
            path = self._tasks[name].log_path
            lines = run_files.last_lines(path)
            messages.append(f"--- last {len(lines)} lines of {path}")
            messages += [*lines, "---"]
        return messages

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time.

        Args:
            reason: What the result will say.
        """
        if self._end_state is None:
            self._end_state, self.reason = "stopped", reason
            self._request_stop(time.monotonic())

    def _request_stop(self, now: float) -> None:
        self._kill_time = now + self._topology.grace_secs
        for process in self._processes.values():
            process.request_stop()

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        self._end_state = self._end_state or "stopped"
        for process in self._processes.values():
            process.hang_up()
        for process in self._processes.values():
            process.kill()

    def result(self) -> GroupResult:
        """Returns how the group ended."""
        name = self.failed_task
        lines = run_files.last_lines(self._tasks[name].log_path) if name else []
        return GroupResult(
            group=self.status.group,
            state=self._end_state or self.status.state,
            exit_codes={n: p.exit_code for n, p in self._processes.items()},
            failed_task=name,
            reason=self.reason,
            last_lines=tuple(lines),
            restarts=self._restarts.made,
        )


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"
