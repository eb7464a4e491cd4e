"""One group from its first start to its last: its attempts, and why each ended.

Under synchronous training one lost worker ends all the others' collectives,
and a group with parameter servers does not outlive its chief or a ps. So what
is left of a failed attempt is killed, and all of the group is started again, at
other ports and after a delay; the program resumes from its own backup.

A task that fails ends the attempt, but for the workers of a group with
parameter servers: what a dead one has left undone, its coordinator gives to the
others, and once it is started again at its old address it takes part again. It
takes dead workers back once all of them are back, so once one worker is given
up no other is started again.

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
from tfdistill.status import run_events
from tfdistill.system import untrusted

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
    """Why an attempt ends, once that is decided.

    In the state `"restarting"` another follows once nothing is left of this
    one. `task` is to blame, and `time` by `time.monotonic()`.
    """

    state: str
    reason: str = ""
    exit_code: int = 0
    task: str | None = None
    time: float = 0.0


class SupervisedGroup:
    """Runs a group, attempt after attempt if it may.

    Attributes:
        status: What is shown of the group.
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
        self._holders: list[socket.socket] = []
        self._restarts = restarts.GroupRestarts(limit=topology.max_restarts)
        self._metrics = run_directory.RunDirectory(topology.workdir).metrics(
            group
        )
        self._tail = untrusted.Tail(self._metrics)
        self.status = group_status.GroupStatus(group)
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
        # Those that are started again by themselves, and whether they still
        # are; and the ends that have been dealt with.
        self._workers = {
            task.name: restarts.Restarts(
                limit=topology.num_worker_restarts,
                first_delay_secs=restarts.WORKER_FIRST_DELAY_SECS,
            )
            for task in tasks
            if topology.ps_per_group and task.cluster.task_type == "worker"
        }
        self._gave_up = False
        self._ended: set[str] = set()
        self._watch = watches.TaskWatch(
            self._tasks, topology=topology, note=self._note
        )
        self._start_limit = watches.StartLimit(
            {task.name: task.ready_path for task in tasks},
            limit_secs=topology.start_timeout_secs,
            now=time.monotonic(),
        )
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
        self._ended.discard(name)
        # A task that is started again adds to its log; that of an earlier run
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
        restarts = self._end is not None and self._end.state == "restarting"
        return self._is_empty and not restarts

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
        return signs.found_port_taken(self._tasks[name].ready_path)

    def _note(self, event: str, **details: Any) -> None:
        added = self._events.add(
            event, group=self._group, attempt=self.num_starts, **details
        )
        self.status.take(added)

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns texts for the user."""
        for name, process in self.processes.items():
            process.read()
            self._note_news(name, process)
        with contextlib.suppress(OSError):  # It may be read at the next time.
            self.status.update(self._tail.read())
        now = time.monotonic()
        messages = []
        if self._end is None:
            messages = self._judge(now)
        elif now >= self._kill_time:
            self._kill()
        self._show_state()
        if self._is_empty and not self.over and self._restarts.is_due:
            self._restarts.note_start()
            self._prepare()
            self.start()
        return messages

    def _show_state(self) -> None:
        end, status = self._end, self.status
        if end is not None:
            is_known = end.state in ("done", "restarting") or self._is_empty
            status.state = end.state if is_known else "stopping"
        elif status.state == "starting" and status.trains:
            # A script may train without having called make_strategy.
            status.state = "running"

    def _note_news(self, name: str, process: task_process.TaskProcess) -> None:
        """Notes the start, readiness and end of a process, each once."""
        noted = self._noted[name]

        def note(event: str, **details: Any) -> None:
            if event not in noted:
                noted.add(event)
                self._note(event, task=name, **details)

        if process.pid is not None:
            note("start", pid=process.pid, start=process.method)
            if "ready" not in noted and self._tasks[name].ready_path.exists():
                note("ready")
        if process.exit_code is not None:
            note("exit", exit_code=process.exit_code)

    def _judge(self, now: float) -> list[str]:
        """Decides whether the attempt ends, and who is started again."""
        failed = [
            (process.exit_time or now, name, process.exit_code)
            for name, process in self.processes.items()
            if process.exit_code
            and (name not in self._workers or self._lacks_port(name))
        ]
        if failed:
            # The peers of a failed task fail too, so the earliest is to blame.
            when, name, code = min(failed)
            return self._fail(self._describe(name, code), when, name, code)
        if self._has_finished():
            return self._finish()
        running = {
            name: process.pid
            for name, process in self.processes.items()
            if process.exit_code is None
        }
        if late := self._start_limit.late(list(running), now=now):
            self._note("late", reason=late)
            return self._fail(late, now)
        for stuck, why in self._watch.look(running).items():
            if stuck is None:
                messages = self._fail(why, now)
                self._hang_up()
                return messages
            # Its end follows, and is dealt with like any other.
            self._killed_for[stuck] = why
            self.processes[stuck].hang_up()
        return self._restart_workers(now)

    def _has_finished(self) -> bool:
        """Whether all is done: servers never end, so their chief decides."""
        return all(
            process.exit_code == 0
            for name, process in self.processes.items()
            if not self._topology.ps_per_group
            or self._tasks[name].cluster.task_type == "chief"
        )

    def _finish(self) -> list[str]:
        self._note("done")
        self._ask_to_end(_End(state="done"))
        unseen = self._start_limit.unseen(has_metrics=self._metrics.exists())
        if not unseen:
            return []
        self._note("warning", text=unseen)
        return [f"group {self._group}: {unseen}"]

    def _restart_workers(self, now: float) -> list[str]:
        """Starts dead workers again, as far as they may."""
        messages: list[str] = []
        limit = self._topology.num_worker_restarts
        codes = {name: self.processes[name].exit_code for name in self._workers}
        for name, code in codes.items():
            if code is None or name in self._ended:
                continue
            self._ended.add(name)
            what = self._describe(name, code)
            self._watch.note_end(name)
            made = self._workers[name].made
            delay = None if self._gave_up else self._workers[name].plan()
            if delay is not None:
                plan = f"restart {made + 1} of {limit} in {delay:g} s"
                self._note("worker_restart", task=name, delay_secs=delay)
            else:
                self._gave_up = True
                if None not in codes.values():
                    reason = (
                        f"{what}, and no worker is left: one has used up its "
                        f"{limit} restarts (--worker_restarts)"
                    )
                    return messages + self._fail(reason, now, name, code)
                plan = (
                    "no worker is started again any more, as one has used up "
                    f"its {limit} restarts (--worker_restarts)"
                )
            messages.append(f"group {self._group}: {what}; {plan}")
        for name, plans in self._workers.items():
            # Not before its keeper has ended all that it has started.
            is_gone = self.processes[name].closed and not self._gave_up
            if is_gone and plans.is_due:
                self._killed_for.pop(name, None)
                self._start(name)
                plans.note_start()
        return messages

    def _fail(
        self,
        reason: str,
        when: float,
        task: str | None = None,
        code: int = signs.EXIT_RETRY,
    ) -> list[str]:
        """Ends the attempt, and decides whether another follows."""
        # A worker may end with 0 and yet be missed.
        exit_code = code if code > 0 else 128 - code if code else 1
        self._note("failed", task=task, exit_code=exit_code, reason=reason)
        taken = task is not None and self._lacks_port(task)
        delay, text = self._restarts.plan_after(exit_code, port_taken=taken)
        self._ask_to_end(
            _End(
                state="failed" if delay is None else "restarting",
                reason=reason,
                exit_code=exit_code,
                task=task,
                time=when,
            )
        )
        if delay is not None:
            made = self._restarts.made
            self._note("restart", delay_secs=delay, restart=made)
            # Its tasks could only wait for each other.
            self._hang_up()
        messages = [f"group {self._group} failed: {reason}"]
        if task is not None:
            messages += files.quote(self._tasks[task].log_path)
        return messages + ([f"group {self._group}: {text}"] if text else [])

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time."""
        if self._end is None or self._end.state == "restarting":
            self._note("stopped", reason=reason)
            self._ask_to_end(_End(state="stopped", reason=reason))

    def _ask_to_end(self, end: _End) -> None:
        self._end = end
        self._kill_time = time.monotonic() + self._topology.grace_secs
        for process in self.processes.values():
            process.request_stop()

    def _hang_up(self) -> None:
        """Has all tasks killed at once; does not wait for their end."""
        for process in self.processes.values():
            process.hang_up()

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        if self._end is None or self._end.state == "restarting":
            self._end = _End(state="stopped", reason="killed")
        self._kill()

    def _kill(self) -> None:
        self._hang_up()
        for process in self.processes.values():
            process.kill()

    def result(self) -> GroupResult:
        """Returns how the group ended, or how far it is."""
        end = self._end or _End(state=self.status.state)
        blamed = None if end.state == "restarting" else end.task
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
        described = f"{name} {run_events.describe(code)}"
        return self._killed_for.get(name) or described
