"""One attempt to run a group: what ended its tasks, and what is left of them.

A task that fails ends its group, but for the workers of a group with parameter
servers: what a dead one has left undone, its coordinator gives to the others,
and once it is started again at its old address it takes part again.
"""

import os
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill import group_result
from tfdistill import group_status
from tfdistill import json_lines
from tfdistill import launched_task
from tfdistill import local_cluster
from tfdistill import process_news
from tfdistill import run_directory
from tfdistill import run_files
from tfdistill import startup
from tfdistill import task_process
from tfdistill import task_watch
from tfdistill import worker_restarts

# Worth another try, as for a task that lost its peers.
EXIT_RETRY = 75


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
        tasks: Sequence[launched_task.Task],
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
        self._restarts = worker_restarts.WorkerRestarts(
            workers, limit=topology.num_worker_restarts
        )
        self._watch: startup.StartWatch | None = None
        self._task_watch = task_watch.TaskWatch(self._tasks, topology=topology)
        self._killed_for: dict[str, str] = {}
        self._news = process_news.ProcessNews(
            {task.name: task.ready_path for task in tasks}, note=note
        )
        self._kill_time: float | None = None
        self._end_state: str | None = None
        group = tasks[0].cluster.group
        directory = run_directory.RunDirectory(topology.workdir)
        self._tail = json_lines.Tail(directory.metrics(group))
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
        self._watch = startup.StartWatch(
            {name: task.ready_path for name, task in self._tasks.items()},
            limit_secs=self._topology.start_timeout_secs,
            now=time.monotonic(),
        )

    def _start(self, name: str) -> None:
        task = self._tasks[name]
        run_files.forget_progress(task.ready_path)
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
        return startup.found_port_taken(self._tasks[name].ready_path)

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
            self.exit_code, self.failure_time = EXIT_RETRY, now
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
                self.exit_code, self.failure_time = EXIT_RETRY, now
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
            messages += run_files.quote(self._tasks[name].log_path)
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

    def result(self) -> group_result.GroupResult:
        """Returns how the group ended."""
        name = self.failed_task
        lines = run_files.last_lines(self._tasks[name].log_path) if name else []
        return group_result.GroupResult(
            group=self.status.group,
            state=self._end_state or self.status.state,
            exit_codes={n: p.exit_code for n, p in self._processes.items()},
            failed_task=name,
            reason=self.reason,
            last_lines=tuple(lines),
            restarts=self._restarts.made,
        )

    def _describe(self, name: str, code: int) -> str:
        described = f"{name} {group_result.describe(code)}"
        return self._killed_for.get(name) or described
