"""Runs a cluster on this machine, from the first process to the last.

TensorFlow listens on every interface, whatever address `TF_CONFIG` names, and
authenticates nobody; docs/security.md says what to do about it.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from typing import IO

from tfdistill.launcher import files
from tfdistill.launcher import group as supervised_group
from tfdistill.launcher import local_cluster
from tfdistill.launcher import parent
from tfdistill.launcher import task_process
from tfdistill.status import group as group_status
from tfdistill.status import run_events
from tfdistill.status import tables
from tfdistill.system import background

_POLL_SECS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ports_warning(num_ports: int) -> str | None:
    """Returns a warning if others may reach the tasks' ports."""
    found = {name for _, name in socket.if_nameindex()} - {"lo", "lo0"}
    if not num_ports or not found:
        return None
    return (
        f"warning: the tasks' TensorFlow servers ({num_ports} ports) listen on "
        f"every network interface ({', '.join(sorted(found))}) and ask for no "
        "password: whoever reaches them can run code as you. Keep this "
        "machine behind a firewall; see docs/security.md."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        groups: One result for each group, in order.
        exit_code: 0 if all groups are done, else the code of the first task
            whose failure ended its group for good: 128 + n for one ended by
            signal n, 75 if a task did not start in time or a group was stuck,
            130 or 143 after Ctrl-C or SIGTERM.
    """

    groups: tuple[supervised_group.GroupResult, ...]
    exit_code: int


class LocalRun:
    """A run in progress; leaving its `with` block ends every process.

    Example:
        with LocalRun(LocalCluster(command=[...], workdir="run")) as run:
            result = run.wait(timeout_secs=600)
    """

    def __init__(
        self,
        topology: local_cluster.LocalCluster,
        *,
        display: tables.Lines | None = None,
    ) -> None:
        """Describes the run; entering it starts the processes.

        Without a display nothing is shown. ValueError if the environment or
        the workdir cannot be used.
        """
        self._topology = topology
        self._display = display
        self._forks = False
        self._parent: parent.Parent | None = None
        self._until_closed = contextlib.ExitStack()
        self._groups: list[supervised_group.SupervisedGroup] = []
        self._events: run_events.EventLog | None = None
        self._signals: list[int] = []
        self._failure_code = 0
        self._started = 0.0
        self._recorded: tuple[dict[str, int], list[int]] = ({}, [])
        # While the disk is full.
        self._record_pause = background.Backoff(
            first_secs=_POLL_SECS, longest_secs=10.0
        )
        self._said_unwritten = False
        placeholders = range(1, topology.num_ports + 1)
        for tasks in topology.tasks(placeholders):
            for task in tasks:  # Refuse a wrong environment before any start.
                task.environ(os.environ)
        self._lock = files.lock(topology)
        try:
            files.ensure_key(topology, os.environ)
            self._kept_files = files.make_room(topology)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "LocalRun":
        """Starts a process for each task."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kills what is left."""
        self.close()

    def _start(self) -> None:
        topology = self._topology
        if self._kept_files:
            kept = ", ".join(self._kept_files)
            self._say(f"files of an earlier run kept as {kept}")
        replaced = sorted(local_cluster.IDENTITY_VARIABLES & set(os.environ))
        if replaced:
            self._say(f"replaced for each task: {', '.join(replaced)}")
        if warning := ports_warning(topology.num_ports):
            self._say(warning)
        self._events = run_events.EventLog(files.events_path(topology))
        # All ports are reserved before the first task starts.
        for group in range(topology.num_groups):
            self._groups.append(
                supervised_group.SupervisedGroup(
                    group,
                    topology=topology,
                    start_task=self._start_task,
                    events=self._events,
                )
            )
        self._started = time.time()
        why_not = parent.why_not(
            topology.start, topology.command, {**os.environ, **topology.env}
        )
        if why_not:
            self._say(f"each task imports for itself: {why_not}")
        else:
            self._until_closed.enter_context(parent.keep())
            self._forks = True
        for running in self._groups:
            running.start()
        self._say(f"logs: {topology.logs_dir}")

    def _start_task(
        self, env: Mapping[str, str], log_file: IO[bytes]
    ) -> task_process.TaskProcess:
        topology, chosen = self._topology, None
        if self._forks:
            preload = topology.modules
            chosen = parent.get(topology.command, env, preload=preload)
        if chosen is not None and self._parent is None:
            self._parent = chosen
            imported = ", ".join(topology.modules)
            self._say(
                f"tasks are forks of process {chosen.pid}, which imports "
                f"{imported} first"
            )
        return task_process.TaskProcess(
            topology.command, env=env, log_file=log_file, parent=chosen
        )

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name of the task, as far as they have started."""
        return {
            name: process.pid
            for group in self._groups
            for name, process in group.processes.items()
            if process.pid is not None
        }

    @property
    def over(self) -> bool:
        """Whether every process has ended."""
        return all(group.over for group in self._groups)

    def poll(self, timeout_secs: float = _POLL_SECS) -> None:
        """Waits for news at most this long and acts on it."""
        waiting = [
            process
            for group in self._groups
            for process in group.processes.values()
            if not process.closed
        ]
        select.select(waiting, [], [], timeout_secs)
        self._obey_signals()
        self._look_at_parent()
        for group in self._groups:
            for message in group.advance():
                self._say(message)
        self._settle_failures()
        self._record()
        if self._events is not None and self._events.error is not None:
            self._warn_of(self._events.error)
        if self._display is not None:
            self._display.show(self._status())

    def _look_at_parent(self) -> None:
        found = self._parent
        if found is None or not (why := found.failure):
            return
        self._parent, self._forks = None, False
        self._say(
            f"warning: process {found.pid} forks no more tasks, as {why}; "
            "those that run are not affected, later ones import for themselves"
        )
        if self._events is not None:
            self._events.add("parent", pid=found.pid, failure=why)

    def _status(self) -> group_status.RunStatus:
        statuses = [group.status for group in self._groups]
        return group_status.RunStatus(time=time.time(), groups=statuses)

    def wait(self, timeout_secs: float | None = None) -> RunResult:
        """Supervises the run to its end, or raises TimeoutError."""
        start = time.monotonic()
        while not self.over:
            if timeout_secs is not None:
                if time.monotonic() - start > timeout_secs:
                    running = [
                        tables.group_line(g.status) for g in self._groups
                    ]
                    raise TimeoutError(
                        f"the run has not ended within {timeout_secs:g} s: "
                        f"{'; '.join(running)}"
                    )
            self.poll()
        self.poll(0)  # States and messages of the last to end.
        return self.result()

    def supervise(self) -> RunResult:
        """Starts everything and supervises it to the end.

        In the main thread, SIGINT (Ctrl-C), SIGTERM and SIGHUP stop all tasks;
        a second one kills them at once.
        """
        with _handlers(self), self:
            return self.wait()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ends the run as the signal does; a second time kills at once."""
        self._signals.append(number)

    @property
    def received(self) -> int | None:
        """The first signal that ended the run, or None."""
        return self._signals[0] if self._signals else None

    def _obey_signals(self) -> None:
        if not self._signals:
            return
        name = signal.Signals(self._signals[0]).name
        for group in self._groups:
            if len(self._signals) > 1:
                group.kill()
            group.stop(f"the launcher received {name}")

    def _settle_failures(self) -> None:
        failures = [
            (*group.failure, number)
            for number, group in enumerate(self._groups)
            if group.failure is not None
        ]
        if not failures or self._failure_code:
            return
        _, self._failure_code, number = min(failures)
        if self._topology.on_group_failure == "stop":
            reason = (
                f"group {number} failed; with --on_group_failure=continue the "
                "others train on"
            )
            for group in self._groups:
                group.stop(reason)

    def _record(self) -> None:
        """Writes what runs, once the process ids of new tasks are known."""
        num_processes = sum(len(group.processes) for group in self._groups)
        pids = self.pids
        attempts = [group.num_starts for group in self._groups]
        known = (pids, attempts)
        if known == self._recorded or len(pids) < num_processes:
            return
        if not self._record_pause.is_over:
            return
        try:
            files.write_record(
                self._topology,
                started=self._started,
                pids=pids,
                attempts=attempts,
            )
        except OSError as error:
            self._record_pause.failed()
            self._warn_of(error)  # Room on a disk may come back.
        else:
            self._record_pause.succeeded()
            self._recorded = known

    def _warn_of(self, error: OSError) -> None:
        """Reports, once, that a file of the launcher's cannot be written."""
        if self._said_unwritten:
            return
        self._said_unwritten = True
        self._say(
            f"warning: the launcher cannot write to {self._topology.workdir} "
            f"({error.strerror}); the run and its restarts continue, but "
            "launch.json and logs/events.jsonl may lack what happens. Free "
            "some space."
        )

    def result(self) -> RunResult:
        """Returns how the run ended, or how far it is."""
        code = self._failure_code
        if self._signals:
            code = 128 + self._signals[0]
        groups = tuple(group.result() for group in self._groups)
        return RunResult(groups=groups, exit_code=code)

    def close(self) -> None:
        """Kills every process that is left and frees the ports."""
        for group in self._groups:
            if not group.over:
                group.kill()
            group.close()
        self._until_closed.close()
        if self._events is not None:
            self._events.add("end", exit_code=self.result().exit_code)
            self._events = None
        self._lock.close()

    def _say(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)


@contextlib.contextmanager
def _handlers(local_run: LocalRun) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {
        number: signal.signal(number, lambda n, _: local_run.interrupt(n))
        for number in _SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
