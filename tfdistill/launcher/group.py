"""One group from its first start to its last: its attempts, and why each ended.

Under synchronous training one lost worker ends all the others' collectives,
and a group with parameter servers does not outlive its chief or a ps. So what
is left of a failed group is killed, and all of it is started again, at other
ports and after a delay; the program goes on from its own backup.

A task that fails ends its group, but for the workers of a group with parameter
servers: what a dead one has left undone, its coordinator gives to the others,
and once it is started again at its old address it takes part again.
"""

import dataclasses
import functools
import os
import pathlib
import socket
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

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


class GroupRun:
    """Supervises the processes of one group.

    Attributes:
        status: What is shown of the group.
        reason: Why the group ends or ended early; empty if it did not.
        exit_code: What the group makes the launcher's exit code; 0 if done.
        failed_task: Name of the task to blame, or None.
        failure_time: When it failed, by `time.monotonic()`; None if not.
        port_taken: Whether it failed since a task's address was in use.
    """

    def __init__(
        self,
        tasks: Sequence[local_cluster.Task],
        *,
        topology: local_cluster.LocalCluster,
        note: Callable[..., None],
    ) -> None:
        """Describes the group; `start` starts it.

        Args:
            tasks: The tasks of the group.
            topology: What they are a part of.
            note: Takes an event, its task and details; see `run_events`.
        """
        self._note = note
        self._tasks = {task.name: task for task in tasks}
        self._topology = topology
        self._processes: dict[str, task_process.TaskProcess] = {}
        workers = [
            task.name
            for task in tasks
            if topology.ps_per_group and task.cluster.task_type == "worker"
        ]
        self._restarts = restarts.WorkerRestarts(
            workers, limit=topology.num_worker_restarts
        )
        self._watch: watches.StartWatch | None = None
        self._task_watch = watches.TaskWatch(self._tasks, topology=topology)
        self._killed_for: dict[str, str] = {}
        self._news = ProcessNews(
            {task.name: task.ready_path for task in tasks}, note=note
        )
        self._kill_time: float | None = None
        self._end_state: str | None = None
        group = tasks[0].cluster.group
        directory = run_directory.RunDirectory(topology.workdir)
        self._tail = untrusted.Tail(directory.metrics(group))
        self.status = group_status.GroupStatus(group)
        self.reason = ""
        self.exit_code = 0
        self.failed_task: str | None = None
        self.failure_time: float | None = None
        self.port_taken = False

    def start(self) -> None:
        """Starts a process for each task."""
        for name in self._tasks:
            self._start(name)
        self._watch = watches.StartWatch(
            {name: task.ready_path for name, task in self._tasks.items()},
            limit_secs=self._topology.start_timeout_secs,
            now=time.monotonic(),
        )

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        files.forget_progress(task.ready_path)
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

    def _lacks_port(self, name: str) -> bool:
        return signs.found_port_taken(self._tasks[name].ready_path)

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns what to tell the user."""
        for process in self._processes.values():
            process.read()
        self._news.tell(self._processes)
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
            if process.exit_code
            and (name not in self._restarts.made or self._lacks_port(name))
        ]
        if failed:
            # The peers of a failed task fail too, so the earliest is to blame.
            when, name, code = min(failed)
            return self._blame(name, code, self._describe(name, code), when)
        if self._has_finished():
            self._end_state = "done"
            self._note("done")
            self._request_stop(now)
            return []
        running = [n for n, p in self._processes.items() if p.exit_code is None]
        late = self._watch and self._watch.late(running, now=now)
        if late:
            self._note("late", reason=late)
            self.exit_code, self.failure_time = signs.EXIT_RETRY, now
            return self._fail(None, late, now)
        messages = self._look(now)
        if self._end_state is None:
            messages += self._mend(now)
        warning = self._watch and self._watch.warning(now=now)
        if warning and self._end_state is None:
            messages.append(f"group {self.status.group}: {warning}")
        return messages

    def _look(self, now: float) -> list[str]:
        """Kills the tasks that do nothing."""
        messages: list[str] = []
        for found in self._task_watch.look(self._processes):
            self._note(found.event, task=found.task, **found.details)
            if found.text and found.task is None:
                self.exit_code, self.failure_time = signs.EXIT_RETRY, now
                messages += self._fail(None, found.text, now)
                self.hang_up()
                break
            if found.text and found.task is not None:
                # Its end follows, and is dealt with like any other.
                self._killed_for[found.task] = found.text
                self._processes[found.task].hang_up()
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
            self.status.last_error = what = self._describe(name, code)
            self._task_watch.note_end(name)
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
        for name in self._restarts.due(now=now):
            # Not before its keeper has ended all that it has started.
            if self._processes[name].closed:
                self._killed_for.pop(name, None)
                self._start(name)
                self._restarts.note_restart(name, now=now)
                self.status.num_worker_restarts += 1
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
        self.port_taken = self._lacks_port(name)
        return self._fail(name, reason, time.monotonic())

    def _fail(self, name: str | None, reason: str, now: float) -> list[str]:
        self.failed_task, self.reason = name, reason
        self._end_state = "failed"
        self._note("failed", task=name, exit_code=self.exit_code, reason=reason)
        self._request_stop(now)
        messages = [f"group {self.status.group} failed: {reason}"]
        if name is not None:
            messages += files.quote(self._tasks[name].log_path)
        return messages

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time.

        Args:
            reason: What the result will say.
        """
        if self._end_state is None:
            self._end_state, self.reason = "stopped", reason
            self._note("stopped", reason=reason)
            self._request_stop(time.monotonic())

    def _request_stop(self, now: float) -> None:
        self._kill_time = now + self._topology.grace_secs
        for process in self._processes.values():
            process.request_stop()

    def hang_up(self) -> None:
        """Has all tasks killed at once; does not wait for their end."""
        for process in self._processes.values():
            process.hang_up()

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        self._end_state = self._end_state or "stopped"
        self.hang_up()
        for process in self._processes.values():
            process.kill()

    def result(self) -> run_events.GroupResult:
        """Returns how the group ended."""
        name = self.failed_task
        lines = files.last_lines(self._tasks[name].log_path) if name else []
        return run_events.GroupResult(
            group=self.status.group,
            state=self._end_state or self.status.state,
            exit_codes={n: p.exit_code for n, p in self._processes.items()},
            failed_task=name,
            reason=self.reason,
            last_lines=tuple(lines),
            restarts=self._restarts.made,
        )

    def _describe(self, name: str, code: int) -> str:
        described = f"{name} {run_events.describe(code)}"
        return self._killed_for.get(name) or described


class SupervisedGroup:
    """Runs a group, again and again if it may."""

    def __init__(
        self,
        group: int,
        *,
        topology: local_cluster.LocalCluster,
        events: run_events.EventLog,
    ) -> None:
        """Reserves the ports of the group; `start` starts it.

        Args:
            group: Index of the group.
            topology: What it is a part of.
            events: Where to note what happens.
        """
        self._group = group
        self._topology = topology
        self._events = events
        self._holders: list[socket.socket] = []
        self._restarts = restarts.GroupRestarts(
            limit=topology.max_restarts, now=time.monotonic()
        )
        # Whether a failed attempt is being ended, or was, to be followed by
        # another; and why there will be none, once it was decided so.
        self._awaits_restart = False
        self._last_error = ""
        self._stop_reason: str | None = None
        self._judged = False
        self._run = self._make_run()

    def _make_run(self) -> GroupRun:
        # The new ports before the old are let go, so that they differ.
        holders = local_cluster.reserve_ports(self._topology.ports_per_group)
        self.close()
        self._holders = holders
        ports = [holder.getsockname()[1] for holder in holders]
        tasks = self._topology.group_tasks(self._group, ports)
        if self.num_starts > 1:
            for task in tasks:
                files.mark_restart(task.log_path, self.num_starts)
        return GroupRun(
            tasks,
            topology=self._topology,
            note=functools.partial(
                self._events.add,
                group=self._group,
                attempt=self._restarts.num_starts,
            ),
        )

    def start(self) -> None:
        """Starts a process for each task."""
        self._run.start()

    @property
    def num_starts(self) -> int:
        """How often the group has been started."""
        return self._restarts.num_starts

    @property
    def status(self) -> group_status.GroupStatus:
        """What is shown of the group."""
        status = self._run.status
        status.num_restarts = self._restarts.made
        if self._run.exit_code:
            status.last_error = self._run.reason
        status.last_error = status.last_error or self._last_error
        if self._awaits_restart:
            stopped = self._stop_reason is not None
            status.state = "stopped" if stopped else "restarting"
        return status

    @property
    def processes(self) -> Mapping[str, task_process.TaskProcess]:
        """The processes of the present attempt, by name of the task."""
        return self._run.processes

    @property
    def over(self) -> bool:
        """Whether no process of the group is left, and none will come."""
        waits = self._awaits_restart and self._stop_reason is None
        return self._run.over and not waits

    @property
    def exit_code(self) -> int:
        """What the group makes the launcher's exit code; 0 if it may go on."""
        return self._run.exit_code if self._judged else 0

    @property
    def failure_time(self) -> float | None:
        """When it failed in the end, by `time.monotonic()`; None if not."""
        return self._run.failure_time if self._judged else None

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns what to tell the user."""
        messages = self._run.advance()
        now = time.monotonic()
        if self._run.exit_code and not self._awaits_restart:
            messages += self._decide(now)
        if (
            self._awaits_restart
            and self._stop_reason is None
            and self._run.over
            and self._restarts.is_due(now=now)
        ):
            self._start_again(now)
        return messages

    def _decide(self, now: float) -> list[str]:
        """Decides, once for each failure, whether the group comes back."""
        if self._judged:
            return []
        delay, text = self._restarts.plan(
            self._run.exit_code, port_taken=self._run.port_taken, now=now
        )
        if delay is None:
            self._judged = True
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
            self._run.hang_up()
        return [f"group {self._group}: {text}"] if text else []

    def _start_again(self, now: float) -> None:
        self._awaits_restart = False
        self._last_error = self._run.reason
        self._restarts.note_start(now=now)
        self._run = self._make_run()
        self._run.start()

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time.

        Args:
            reason: What the result will say.
        """
        if self._awaits_restart and self._stop_reason is None:
            self._stop_reason = reason
            self._events.add("stopped", group=self._group, reason=reason)
        self._run.stop(reason)

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        if self._awaits_restart and self._stop_reason is None:
            self._stop_reason = "killed"
        self._run.kill()

    def result(self) -> run_events.GroupResult:
        """Returns how the group ended."""
        result = self._run.result()
        result = dataclasses.replace(result, group_restarts=self._restarts.made)
        if not self._awaits_restart:
            return result
        reason = self._stop_reason
        return dataclasses.replace(
            result,
            state="restarting" if reason is None else "stopped",
            reason=result.reason if reason is None else reason,
            failed_task=None,
            last_lines=(),
        )

    def close(self) -> None:
        """Frees the ports of the present attempt."""
        for holder in self._holders:
            holder.close()
        self._holders = []
