"""One group from its first start to its last: its attempts, and why each ended.

Under synchronous training one lost worker ends all the others' collectives,
and a group with parameter servers does not outlive its chief or a ps. So what
is left of a failed attempt is killed, and all of the group is started again, at
other ports and after a delay; the program resumes from its own backup.

A task that fails ends the attempt, but for the workers of a group with
parameter servers: what a dead one has left undone, its coordinator gives to the
others, and once it is started again at its old address it takes part again.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO

from tfdistill.cluster import signs
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import restarts
from tfdistill.launcher import task_process
from tfdistill.launcher import watches
from tfdistill.status import directory as run_directory
from tfdistill.status import group as group_status
from tfdistill.status import run_events
from tfdistill.system import untrusted

# Binds so many sockets to free ports; see local_cluster.reserve_ports.
ReservePorts = Callable[[int], list[socket.socket]]
# Starts a task with an environment, all of its output to a file.
StartTask = Callable[[Mapping[str, str], IO[bytes]], task_process.TaskProcess]


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
        restarts: How often each worker was started again, by name, since the
            group was last started; of a group with parameter servers only.
        group_restarts: How often the whole group was started again.
    """

    group: int
    state: str
    exit_codes: Mapping[str, int | None]
    failed_task: str | None
    reason: str
    last_lines: tuple[str, ...]
    restarts: Mapping[str, int]
    group_restarts: int


class Attempt:
    """One start of a group: its processes, until none of them is left.

    Attributes:
        status: What is shown of the group.
        processes: The processes started so far, by name of the task.
        end_state: `"done"`, `"failed"` or `"stopped"`; None before it ends.
        reason: Why it ends or ended early; empty if it did not.
        exit_code: What it makes the launcher's exit code; 0 if done.
        failed_task: Name of the task to blame, or None.
        failure_time: When it failed, by `time.monotonic()`; None if not.
        port_taken: Whether it failed since a task's address was in use.
    """

    def __init__(
        self,
        tasks: Sequence[local_cluster.Task],
        *,
        topology: local_cluster.LocalCluster,
        start_task: StartTask,
        note: Callable[..., None],
    ) -> None:
        """Describes the attempt; `start` starts it.

        `note` takes an event, its task and its details; see `run_events`.
        """
        self._note = note
        self._start_task = start_task
        self._tasks = {task.name: task for task in tasks}
        self._topology = topology
        self._restarts = restarts.WorkerRestarts(
            [
                task.name
                for task in tasks
                if topology.ps_per_group and task.cluster.task_type == "worker"
            ],
            limit=topology.num_worker_restarts,
        )
        self._watch = watches.TaskWatch(self._tasks, topology=topology)
        self._killed_for: dict[str, str] = {}
        # By event and process id, as a task may be started again.
        self._noted: set[tuple[str, int | None]] = set()
        self._kill_time: float | None = None
        group = tasks[0].cluster.group
        directory = run_directory.RunDirectory(topology.workdir)
        self._metrics = directory.metrics(group)
        self._tail = untrusted.Tail(self._metrics)
        self.status = group_status.GroupStatus(group)
        self.processes: dict[str, task_process.TaskProcess] = {}
        self.end_state: str | None = None
        self.reason = ""
        self.exit_code = 0
        self.failed_task: str | None = None
        self.failure_time: float | None = None
        self.port_taken = False
        self._start_limit = watches.StartLimit(
            {task.name: task.ready_path for task in tasks},
            limit_secs=topology.start_timeout_secs,
            now=time.monotonic(),
        )

    def start(self) -> None:
        """Starts a process for each task."""
        for name in self._tasks:
            self._start(name)

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        files.forget_progress(task.ready_path)
        # A task that is started again adds to its log; that of an earlier run
        # has another name by now.
        with files.open_log(task.log_path) as log_file:
            self.processes[name] = self._start_task(
                task.environ(os.environ), log_file
            )

    @property
    def over(self) -> bool:
        """Whether no process is left."""
        return all(process.closed for process in self.processes.values())

    @property
    def worker_restarts(self) -> Mapping[str, int]:
        """How often each worker was started again, by name."""
        return self._restarts.made

    def _lacks_port(self, name: str) -> bool:
        return signs.found_port_taken(self._tasks[name].ready_path)

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns texts for the user."""
        for name, process in self.processes.items():
            process.read()
            self._note_news(name, process)
        with contextlib.suppress(OSError):  # It may be read at the next time.
            self.status.update(self._tail.read())
        now = time.monotonic()
        messages = []
        if self.end_state is None:
            messages = self._judge(now)
        elif self._kill_time is not None and now >= self._kill_time:
            self.kill()
        if self.end_state is None:
            self.status.state = "running" if self._runs() else "starting"
        else:
            ended = self.over or self.end_state == "done"
            self.status.state = self.end_state if ended else "stopping"
        return messages

    def _note_news(self, name: str, process: task_process.TaskProcess) -> None:
        """Notes the start, readiness and end of a process, each once."""
        pid, code = process.pid, process.exit_code
        if pid is not None and self._is_new("start", pid):
            self._note("start", task=name, pid=pid, start=process.method)
        # A check of the file only as long as it is of interest.
        if pid is not None and ("ready", pid) not in self._noted:
            if self._tasks[name].ready_path.exists():
                self._noted.add(("ready", pid))
                self._note("ready", task=name)
        if name == next(iter(self._tasks)):
            self._note_start(name, pid)
        if code is not None and self._is_new("exit", pid):
            self._note("exit", task=name, exit_code=code)

    def _note_start(self, name: str, pid: int | None) -> None:
        """Notes how far the first task's start is, until its first step."""
        if pid is None or ("first_step", pid) in self._noted:
            return
        found = signs.read_parts(self._tasks[name].ready_path)
        if found is None:
            return
        part, secs = found
        self.status.starting = part or ""
        if part is None:
            self._noted.add(("first_step", pid))
            self._note("first_step", task=name, secs=secs)
        elif self._is_new(f"starting {part}", pid):
            self._note("starting", task=name, part=part)

    def _is_new(self, event: str, pid: int | None) -> bool:
        new = (event, pid) not in self._noted
        self._noted.add((event, pid))
        return new

    def _runs(self) -> bool:
        ready = any(task.ready_path.exists() for task in self._tasks.values())
        return ready or bool(self.status.record)

    def _judge(self, now: float) -> list[str]:
        failed = [
            (process.exit_time or now, name, process.exit_code)
            for name, process in self.processes.items()
            if process.exit_code
            and (name not in self.worker_restarts or self._lacks_port(name))
        ]
        if failed:
            # The peers of a failed task fail too, so the earliest is to blame.
            when, name, code = min(failed)
            return self._blame(name, code, self._describe(name, code), when)
        if self._has_finished():
            self.end_state = "done"
            self._note("done")
            self._request_stop()
            has_metrics = self._metrics.exists()
            unseen = self._start_limit.unseen(has_metrics=has_metrics)
            if unseen:
                self._note("warning", text=unseen)
            return [f"group {self.status.group}: {unseen}"] if unseen else []
        running = [n for n, p in self.processes.items() if p.exit_code is None]
        late = self._start_limit.late(running, now=now)
        if late:
            self._note("late", reason=late)
            return self._give_up(late, now)
        messages = self._look(now)
        if self.end_state is None:
            messages += self._restart_workers(now)
        warning = self._start_limit.warning(now=now)
        if warning and self.end_state is None:
            messages.append(f"group {self.status.group}: {warning}")
        return messages

    def _look(self, now: float) -> list[str]:
        """Kills the tasks that do nothing."""
        for found in self._watch.look(self.processes):
            self._note(found.event, task=found.task, **found.details)
            if found.text and found.task is None:
                messages = self._give_up(found.text, now)
                self.hang_up()
                return messages
            if found.text and found.task is not None:
                # Its end follows, and is dealt with like any other.
                self._killed_for[found.task] = found.text
                self.processes[found.task].hang_up()
        return []

    def _restart_workers(self, now: float) -> list[str]:
        """Starts dead workers again, as far as they may."""
        messages: list[str] = []
        limit = self._restarts.limit
        for name, made in self.worker_restarts.items():
            code = self.processes[name].exit_code
            if code is None or self._restarts.is_known_dead(name):
                continue
            delay = self._restarts.note_end(name)
            self.status.last_error = what = self._describe(name, code)
            self._watch.note_end(name)
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
                self._note("worker_restart", task=name, delay_secs=delay)
            messages.append(f"group {self.status.group}: {what}; {plan}")
        for name in self._restarts.due():
            # Not before its keeper has ended all that it has started.
            if self.processes[name].closed:
                self._killed_for.pop(name, None)
                self._start(name)
                self._restarts.note_start(name)
                self.status.num_worker_restarts += 1
        return messages

    def _has_finished(self) -> bool:
        """Whether all is done: servers never end, so their chief decides."""
        return all(
            process.exit_code == 0
            for name, process in self.processes.items()
            if not self._topology.ps_per_group
            or self._tasks[name].cluster.task_type == "chief"
        )

    def _blame(
        self, name: str, code: int, reason: str, when: float
    ) -> list[str]:
        # A worker may end with 0 and yet be missed.
        self.exit_code = code if code > 0 else 128 - code if code else 1
        self.failure_time = when
        self.failed_task = name
        self.port_taken = self._lacks_port(name)
        quoted = files.quote(self._tasks[name].log_path)
        return [*self._fail(reason), *quoted]

    def _give_up(self, reason: str, now: float) -> list[str]:
        """Fails when no single task is to blame."""
        self.exit_code, self.failure_time = signs.EXIT_RETRY, now
        return self._fail(reason)

    def _fail(self, reason: str) -> list[str]:
        self.end_state, self.reason = "failed", reason
        self._note(
            "failed",
            task=self.failed_task,
            exit_code=self.exit_code,
            reason=reason,
        )
        self._request_stop()
        return [f"group {self.status.group} failed: {reason}"]

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time."""
        if self.end_state is None:
            self.end_state, self.reason = "stopped", reason
            self._note("stopped", reason=reason)
            self._request_stop()

    def _request_stop(self) -> None:
        self._kill_time = time.monotonic() + self._topology.grace_secs
        for process in self.processes.values():
            process.request_stop()

    def hang_up(self) -> None:
        """Has all tasks killed at once; does not wait for their end."""
        for process in self.processes.values():
            process.hang_up()

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        self.end_state = self.end_state or "stopped"
        self.hang_up()
        for process in self.processes.values():
            process.kill()

    def last_lines(self) -> tuple[str, ...]:
        """Returns the last lines of the log of the task to blame."""
        if self.failed_task is None:
            return ()
        return tuple(files.last_lines(self._tasks[self.failed_task].log_path))

    def _describe(self, name: str, code: int) -> str:
        described = f"{name} {run_events.describe(code)}"
        return self._killed_for.get(name) or described


class SupervisedGroup:
    """Runs a group, attempt after attempt if it may."""

    def __init__(
        self,
        group: int,
        *,
        topology: local_cluster.LocalCluster,
        start_task: StartTask,
        events: run_events.EventLog,
        reserve_ports: ReservePorts = local_cluster.reserve_ports,
    ) -> None:
        """Reserves the ports of the first attempt; `start` starts it."""
        self._group = group
        self._topology = topology
        self._start_task = start_task
        self._events = events
        self._reserve_ports = reserve_ports
        self._holders: list[socket.socket] = []
        self._restarts = restarts.GroupRestarts(limit=topology.max_restarts)
        # Whether a failed attempt is being ended, or was, to be followed by
        # another; and why there will be none, once it was decided so.
        self._awaits_restart = False
        self._last_error = ""
        self._stop_reason: str | None = None
        self._has_failed = False
        self._attempt = self._new_attempt()

    def _new_attempt(self) -> Attempt:
        # The new ports before the old are let go, so that they differ.
        holders = self._reserve_ports(self._topology.ports_per_group)
        self.close()
        self._holders = holders
        ports = [holder.getsockname()[1] for holder in holders]
        tasks = self._topology.group_tasks(self._group, ports)
        if self.num_starts > 1:
            for task in tasks:
                files.mark_restart(task.log_path, self.num_starts)
        note = functools.partial(
            self._events.add, group=self._group, attempt=self.num_starts
        )
        return Attempt(
            tasks,
            topology=self._topology,
            start_task=self._start_task,
            note=note,
        )

    def start(self) -> None:
        """Starts a process for each task."""
        self._attempt.start()

    @property
    def num_starts(self) -> int:
        """How often the group has been started."""
        return self._restarts.num_starts

    @property
    def status(self) -> group_status.GroupStatus:
        """What is shown of the group."""
        status = self._attempt.status
        status.num_restarts = self._restarts.made
        if self._attempt.exit_code:
            status.last_error = self._attempt.reason
        status.last_error = status.last_error or self._last_error
        if self._awaits_restart:
            status.state = "restarting" if self._will_restart else "stopped"
        return status

    @property
    def processes(self) -> Mapping[str, task_process.TaskProcess]:
        """The processes of the present attempt, by name of the task."""
        return self._attempt.processes

    @property
    def _will_restart(self) -> bool:
        return self._awaits_restart and self._stop_reason is None

    @property
    def over(self) -> bool:
        """Whether no process of the group is left, and none will come."""
        return self._attempt.over and not self._will_restart

    @property
    def exit_code(self) -> int:
        """What the group makes the launcher's exit code; 0 if it may resume."""
        return self._attempt.exit_code if self._has_failed else 0

    @property
    def failure_time(self) -> float | None:
        """When it failed in the end, by `time.monotonic()`; None if not."""
        return self._attempt.failure_time if self._has_failed else None

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns texts for the user."""
        messages = self._attempt.advance()
        failed = bool(self._attempt.exit_code)
        if failed and not (self._awaits_restart or self._has_failed):
            messages += self._decide()
        if self._will_restart and self._attempt.over and self._restarts.is_due:
            self._awaits_restart = False
            self._last_error = self._attempt.reason
            self._restarts.note_start()
            self._attempt = self._new_attempt()
            self._attempt.start()
        return messages

    def _decide(self) -> list[str]:
        """Decides, once for each failure, whether the group comes back."""
        delay, text = self._restarts.plan_after(
            self._attempt.exit_code, port_taken=self._attempt.port_taken
        )
        if delay is None:
            self._has_failed = True
        else:
            self._awaits_restart = True
            self._events.add(
                "restart",
                group=self._group,
                attempt=self.num_starts,
                delay_secs=delay,
                restart=self._restarts.made,
            )
            # Its tasks could only wait for each other.
            self._attempt.hang_up()
        return [f"group {self._group}: {text}"] if text else []

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time."""
        if self._will_restart:
            self._stop_reason = reason
            self._events.add("stopped", group=self._group, reason=reason)
        self._attempt.stop(reason)

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        if self._will_restart:
            self._stop_reason = "killed"
        self._attempt.kill()

    def result(self) -> GroupResult:
        """Returns how the group ended, or how far it is."""
        attempt, state = self._attempt, self.status.state
        blamed = not self._awaits_restart
        if blamed and attempt.end_state is not None:
            state = attempt.end_state
        return GroupResult(
            group=self._group,
            state=state,
            exit_codes={n: p.exit_code for n, p in attempt.processes.items()},
            failed_task=attempt.failed_task if blamed else None,
            reason=self._stop_reason or attempt.reason,
            last_lines=attempt.last_lines() if blamed else (),
            restarts=attempt.worker_restarts,
            group_restarts=self._restarts.made,
        )

    def close(self) -> None:
        """Frees the ports of the present attempt."""
        for holder in self._holders:
            holder.close()
        self._holders = []
