"""One group from its first start to its last: its attempts, and why each ended.

Under synchronous training one lost worker ends all the others' collectives,
and a group with parameter servers does not outlive its chief or a ps. So what
is left of a failed attempt is killed, and all of the group is started again, at
other ports and after a delay; the program resumes from its own backup.

A task that fails ends the attempt, except for a worker of a group with
parameter servers: the coordinator gives its unfinished work to other workers,
and a worker that is started again at its old address takes part again. The
coordinator takes dead workers back once all of them are back, so once one
worker is given up no other is started again.

`advance` takes in the news of the processes, judges them once (`_judge`), and
does what follows from how the attempt ends (`_End`).
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import IO
from typing import Any

from tfdistill.cluster import signs
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import restarts
from tfdistill.launcher import task_process
from tfdistill.launcher import watches
from tfdistill.status import directory as run_directory
from tfdistill.status import group as group_status
from tfdistill.status import logs
from tfdistill.status import run_events
from tfdistill.system import untrusted

# Starts a task with an environment, all of its output to a file.
StartTask = Callable[[Mapping[str, str], IO[bytes]], task_process.TaskProcess]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How one group ended.

    Attributes:
        group: Index of the group.
        state: `"done"`, `"failed"` or, if it was stopped, `"stopped"`.
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


@dataclasses.dataclass(frozen=True)
class _End:
    """Why an attempt ends, once that is decided.

    In the state `"restarting"` another attempt follows once nothing is left of
    this one. `task` is the cause, at `time` by `time.monotonic()`.
    """

    state: str
    reason: str = ""
    exit_code: int = 0
    task: str | None = None
    time: float = 0.0


class SupervisedGroup:
    """Runs a group, attempt after attempt if it may.

    Attributes:
        status: The group's state, as it is shown.
        processes: The processes of the present attempt, by name of the task.
    """

    def __init__(
        self,
        group: int,
        *,
        topology: local_cluster.LocalCluster,
        start_task: StartTask,
        events: run_events.EventLog,
    ) -> None:
        """Reserves the ports of the first attempt; `start` starts it."""
        self._group = group
        self._topology = topology
        self._start_task = start_task
        self._events = events
        self._said: list[str] = []
        self._holders: list[socket.socket] = []
        self._restarts = restarts.Restarts(limit=topology.max_restarts)
        run = run_directory.RunDirectory(topology.workdir)
        self._tail = untrusted.Tail(run.metrics(group))
        self.status = group_status.GroupStatus(group, since=time.time())
        self._prepare()

    def _prepare(self) -> None:
        """Forgets the last attempt, and describes the next."""
        topology = self._topology
        # The new ports before the old are let go, so that they differ.
        holders = local_cluster.reserve_ports(topology.ports_per_group)
        self.close()
        self._holders = holders
        ports = [holder.getsockname()[1] for holder in holders]
        tasks = topology.group_tasks(self._group, ports)
        self._tasks = {task.name: task for task in tasks}
        # Tasks that are restarted alone, and whether they still are.
        self._workers = {
            task.name: restarts.Restarts(
                limit=topology.worker_restarts,
                first_delay_secs=restarts.WORKER_FIRST_DELAY_SECS,
            )
            for task in tasks
            if topology.ps_per_group and task.cluster.task_type == "worker"
        }
        self._gave_up = False
        self._watch = watches.TaskWatch(self._tasks, topology=topology)
        # By name of the task: why it was killed, and what is noted of it.
        self._killed_for: dict[str, str] = {}
        self._noted: dict[str, set[str]] = {}
        self._end: _End | None = None
        self._kill_time = 0.0
        self.processes: dict[str, task_process.TaskProcess] = {}

    def start(self) -> None:
        """Starts a process for each task."""
        for name, task in self._tasks.items():
            if self.num_starts > 1:
                files.mark_restart(task.log_path, self.num_starts)
            self._start(name)

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        files.forget_progress(task.ready_path)
        self._noted[name] = set()
        self._killed_for.pop(name, None)
        # A task that is started again adds to its log; an earlier run's log
        # has another name by now.
        with files.open_log(task.log_path) as log_file:
            self.processes[name] = self._start_task(
                task.environ(os.environ), log_file
            )

    @property
    def num_starts(self) -> int:
        """How often the group has been started."""
        return self._restarts.num_starts

    @property
    def over(self) -> bool:
        """Whether no process of the group is left, and none will come."""
        return self._is_empty and not self._is_restarting

    @property
    def _is_restarting(self) -> bool:
        return self._end is not None and self._end.state == "restarting"

    @property
    def _is_empty(self) -> bool:
        return all(process.closed for process in self.processes.values())

    @property
    def failure(self) -> tuple[float, int] | None:
        """When it failed for good, and the launcher's exit code for that."""
        if self._end is None or self._end.state != "failed":
            return None
        return self._end.time, self._end.exit_code

    def _lacks_port(self, name: str) -> bool:
        return signs.found(self._tasks[name].ready_path, signs.PORT_TAKEN)

    def _note(self, event: str, **details: Any) -> None:
        added = self._events.add(
            event, group=self._group, attempt=self.num_starts, **details
        )
        self.status.take_event(added)

    def _say(self, text: str) -> None:
        self._said.append(f"group {self._group}{text}")

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns texts for the user."""
        for name, process in self.processes.items():
            process.read()
            self._note_news(name, process)
        with contextlib.suppress(OSError):  # It may be read at the next time.
            self.status.update(self._tail.read())
        now = time.monotonic()
        if self._end is None:
            self._judge(now)
        elif now >= self._kill_time:
            self._kill()
        if self._is_restarting and self._is_empty and self._restarts.is_due:
            self._restarts.note_start()
            self._prepare()
            self.start()
        said, self._said = self._said, []
        return said

    def _note_news(self, name: str, process: task_process.TaskProcess) -> None:
        """Notes the start, readiness and end of a process, each once."""
        news: dict[str, dict[str, Any]] = {}
        if process.pid is not None:
            news["start"] = {"pid": process.pid, "start": process.method}
            if self._tasks[name].ready_path.exists():
                news["ready"] = {}
        if process.exit_code is not None:
            news["exit"] = {"exit_code": process.exit_code}
        for event, details in news.items():
            if event not in self._noted[name]:
                self._noted[name].add(event)
                self._note(event, task=name, **details)

    def _judge(self, now: float) -> None:
        """Decides whether the attempt ends, and which tasks are restarted."""
        failed = [
            (process.exit_time or now, name, process.exit_code)
            for name, process in self.processes.items()
            if process.exit_code
            and (name not in self._workers or self._lacks_port(name))
        ]
        if failed:
            # The peers of a failed task fail too, so the earliest is to blame.
            when, name, code = min(failed)
            self._fail(self._describe(name, code), when, name, code)
            return
        if self._has_finished():
            self._note("done")
            self._close_attempt(_End(state="done"))
            if text := self._watch.never_met():
                self._note("warning", text=text)
                self._say(f": {text}")
            return
        running = {
            name: process.pid
            for name, process in self.processes.items()
            if process.exit_code is None and name not in self._killed_for
        }
        for found in self._watch.look(running):
            self._note(found.event, task=found.task, **found.details)
            if found.task is None:
                self._fail(found.reason, now)
                self._hang_up()
                return
            # Its end follows, and is dealt with like any other.
            self._killed_for[found.task] = found.reason
            self.processes[found.task].hang_up()
        self._restart_workers(now)

    def _has_finished(self) -> bool:
        """Whether all is done: servers never end, so their chief decides."""
        return all(
            process.exit_code == 0
            for name, process in self.processes.items()
            if not self._topology.ps_per_group
            or self._tasks[name].cluster.task_type == "chief"
        )

    def _restart_workers(self, now: float) -> None:
        for name, plans in self._workers.items():
            process = self.processes[name]
            if process.exit_code is None or self._end is not None:
                continue
            if "loss" not in self._noted[name]:
                self._noted[name].add("loss")
                self._plan_restart(name, process.exit_code, now)
            # Not before its keeper has ended all that it has started.
            elif process.closed and plans.is_due and not self._gave_up:
                self._start(name)
                plans.note_start()

    def _plan_restart(self, name: str, code: int, now: float) -> None:
        plans, what = self._workers[name], self._describe(name, code)
        self._watch.note_end(name)
        delay = None if self._gave_up else plans.plan()
        if delay is not None:
            self._note("worker_restart", task=name, delay_secs=delay)
            plan = f"restart {plans.made} of {plans.limit} in {delay:g} s"
            self._say(f": {what}; {plan}")
            return
        self._gave_up = True
        why = (
            f"a worker has used up its {plans.limit} restarts "
            "(--worker-restarts)"
        )
        if any(self.processes[n].exit_code is None for n in self._workers):
            self._say(f": {what}; no more workers are restarted: {why}")
        else:
            reason = f"{what}, and no worker is left: {why}"
            self._fail(reason, now, name, code)

    def _fail(
        self,
        reason: str,
        when: float,
        task: str | None = None,
        code: int = signs.EXIT_RETRY,
    ) -> None:
        """Ends the attempt, and decides whether another follows."""
        # A worker may end with 0 and yet be missed.
        exit_code = code if code > 0 else 128 - code if code else 1
        self._note("failed", task=task, exit_code=exit_code, reason=reason)
        self._say(f" failed: {reason}")
        if task is not None:
            self._said += files.quote(self._tasks[task].log_path)
        taken = task is not None and self._lacks_port(task)
        delay, text = self._restarts.plan_after(exit_code, port_taken=taken)
        if text:
            self._say(f": {text}")
        state = "failed" if delay is None else "restarting"
        self._close_attempt(_End(state, reason, exit_code, task, when))
        if delay is not None:
            made = self._restarts.made
            self._note("restart", delay_secs=delay, restart=made)
            # Its tasks could only wait for each other.
            self._hang_up()

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time."""
        if self._end is None or self._is_restarting:
            self._note("stopped", reason=reason)
            self._say(f" stopped: {reason}")
            self._close_attempt(_End("stopped", reason))

    def _close_attempt(self, end: _End) -> None:
        self._end = end
        self._kill_time = time.monotonic() + self._topology.grace_secs
        for process in self.processes.values():
            process.request_stop()

    def _hang_up(self) -> None:
        """Kills all tasks at once; does not wait for their end."""
        for process in self.processes.values():
            process.hang_up()

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        if self._end is None or self._is_restarting:
            self._end = _End("stopped", "killed")
        self._kill()

    def _kill(self) -> None:
        self._hang_up()
        for process in self.processes.values():
            process.kill()

    def result(self) -> GroupResult:
        """Returns how the group ended, or how far it is."""
        end = self._end or _End(self.status.state)
        blamed = None if self._is_restarting else end.task
        last_lines: list[str] = []
        if blamed is not None:
            last_lines = files.last_lines(self._tasks[blamed].log_path)
        return GroupResult(
            group=self._group,
            state=end.state,
            exit_codes={n: p.exit_code for n, p in self.processes.items()},
            failed_task=blamed,
            reason=end.reason,
            last_lines=tuple(last_lines),
            restarts={n: w.num_starts - 1 for n, w in self._workers.items()},
            group_restarts=self._restarts.made,
        )

    def close(self) -> None:
        """Frees the ports of the present attempt."""
        for holder in self._holders:
            holder.close()
        self._holders = []

    def _describe(self, name: str, code: int) -> str:
        """Names the exception that ended a task; else its exit code."""
        if name in self._killed_for:
            return self._killed_for[name]
        error = logs.last_error([self._tasks[name].log_path])
        if error and code > 0:
            return f"{name}: {error.text} (exit code {code})"
        return f"{name} {run_events.describe(code)}"
