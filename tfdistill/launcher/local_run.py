"""Runs a cluster on this machine, from the first process to the last.

TensorFlow listens on every interface, whatever address `TF_CONFIG` names, and
doesn't authenticate clients; docs/security.md says what to do about it.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import select
import signal
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO
from typing import Any

from tfdistill.launcher import files
from tfdistill.launcher import group as supervised_group
from tfdistill.launcher import local_cluster
from tfdistill.launcher import parent
from tfdistill.launcher import task_process
from tfdistill.status import directory
from tfdistill.status import group as group_status
from tfdistill.status import observed_run
from tfdistill.status import result as outcome
from tfdistill.status import run_events
from tfdistill.status import tables
from tfdistill.system import run_files
from tfdistill.system import untrusted

_POLL_SECS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, and where its files are.

    Attributes:
        groups: One result for each group, in order; its `state` is `"done"`,
            `"failed"` or `"stopped"`.
        exit_code: 0 if all groups are done, else the code of the first task
            whose failure ended its group for good: 128 + n for one ended by
            signal n, 75 if a task did not start in time or a group was stuck,
            130 or 143 after Ctrl-C or SIGTERM.
        workdir: The directory of the run.
        exchange: The directory or URL that the groups shared.
        received: The signal that the launcher received first, if any.
    """

    groups: tuple[supervised_group.GroupResult, ...]
    exit_code: int
    workdir: pathlib.Path
    exchange: str
    received: int | None = None

    def metrics(self, group: int) -> list[dict[str, Any]]:
        """Returns the records of a group's `metrics.jsonl`, in order."""
        path = directory.RunDirectory(self.workdir).metrics(group)
        return list(map(json.loads, path.read_text("utf-8").splitlines()))


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
        display: tables.Lines | tables.Screen | None = None,
    ) -> None:
        """Describes the run; entering it starts the processes.

        Without a display nothing is shown. ValueError if the environment or
        the workdir cannot be used.
        """
        self._topology = topology
        self._display = display
        self._until_closed = contextlib.ExitStack()
        self._groups: list[supervised_group.SupervisedGroup] = []
        self._forks = False
        self._parent: parent.Parent | None = None
        self._signals: list[int] = []
        self._said_unwritten = False
        ports = range(1, topology.ports_per_group + 1)
        for task in topology.group_tasks(0, ports):
            task.environ(os.environ)  # Refuses a wrong environment.
        with contextlib.ExitStack() as at_failure:
            at_failure.enter_context(files.lock(topology))
            files.ensure_key(topology, os.environ)
            self._kept_files = files.make_room(topology)
            files.write_record(topology)
            self._until_closed = at_failure.pop_all()
        self._events = run_events.EventLog(files.events_path(topology))

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
            kept = outcome.short(self._kept_files[-1])
            self._say(f"logs of an earlier run were renamed, such as {kept}")
        replaced = sorted(local_cluster.IDENTITY_VARIABLES & set(os.environ))
        if replaced:
            self._say(
                "ignored from the environment, set for each task: "
                f"{', '.join(replaced)}"
            )
        if topology.ports_per_group:
            self._say(
                "warning: the tasks' TensorFlow servers listen on every "
                "network interface and require no password: anyone who can "
                "reach them can run code as you. Keep this machine behind a "
                "firewall; see docs/security.md."
            )
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
        why_not = parent.why_not(
            topology.start, topology.command, {**os.environ, **topology.env}
        )
        if why_not:
            self._say(f"each task runs its own imports: {why_not}")
        else:
            self._until_closed.enter_context(parent.keep())
            self._forks = True
        for running in self._groups:
            running.start()
        self._say(f"logs: {outcome.short(topology.logs_dir)}")

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
        self._look_at_disk()
        if self._display is not None:
            statuses = [group.status for group in self._groups]
            now = time.time()
            self._display.show(
                group_status.RunStatus(time=now, groups=statuses)
            )

    def _look_at_parent(self) -> None:
        found = self._parent
        if found is None or not (why := found.failure):
            return
        self._parent, self._forks = None, False
        self._say(
            f"warning: process {found.pid} can't fork more tasks: {why}. "
            "Running tasks aren't affected; new ones run their own imports"
        )
        self._events.add("parent", pid=found.pid, failure=why)

    def wait(self, timeout_secs: float = math.inf) -> RunResult:
        """Supervises the run to its end, or raises TimeoutError."""
        limit = time.monotonic() + timeout_secs
        while not self.over:
            if time.monotonic() > limit:
                running = [tables.group_line(g.status) for g in self._groups]
                raise TimeoutError(
                    f"the run has not ended within {timeout_secs:g} s: "
                    f"{'; '.join(running)}"
                )
            self.poll()
        self.poll(0)  # States and messages of the last to end.
        return self.result()

    def supervise(self, commands: outcome.Commands | None = None) -> RunResult:
        """Starts everything, prints what happens and what it came to.

        In the main thread, SIGINT (Ctrl-C), SIGTERM and SIGHUP stop all tasks;
        a second one kills them at once. The `commands` are what is said to be
        next.
        """
        began = time.monotonic()
        with tables.display() as self._display, _handlers(self), self:
            result = self.wait()
        _write_results(result)
        with contextlib.suppress(OSError):
            tables.console().print(
                outcome.view(
                    observed_run.ObservedRun(result.workdir).look(),
                    workdir=result.workdir.absolute(),
                    exchange=result.exchange,
                    secs=time.monotonic() - began,
                    commands=commands or outcome.Commands(),
                ),
                soft_wrap=True,
            )
        return result

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ends the run as the signal does; a second time kills at once."""
        self._signals.append(number)

    def _obey_signals(self) -> None:
        if not self._signals:
            return
        name = signal.Signals(self._signals[0]).name
        if len(self._signals) > 1:
            for group in self._groups:
                group.kill()
        self._stop(f"the launcher received {name}")

    def _stop(self, reason: str) -> None:
        for group in self._groups:
            group.stop(reason)

    def _settle_failures(self) -> None:
        if self._topology.on_group_failure != "stop":
            return
        for number, group in enumerate(self._groups):
            if group.failure is not None:
                self._stop(
                    f"group {number} failed; use --on-group-failure=continue "
                    "to keep the others training"
                )

    def _look_at_disk(self) -> None:
        """Reports, once, that a file of the launcher's cannot be written."""
        error = self._events.error
        if error is None or self._said_unwritten:
            return
        self._said_unwritten = True
        self._say(
            f"warning: the launcher cannot write to {self._topology.workdir} "
            f"({error.strerror}); the run and its restarts continue, but "
            "logs/events.jsonl may be incomplete. Free some disk space."
        )

    def result(self) -> RunResult:
        """Returns how the run ended, or how far it is."""
        workdir = pathlib.Path(self._topology.workdir)
        first = self._signals[0] if self._signals else None
        failures = [group.failure or (math.inf, 0) for group in self._groups]
        _, code = min(failures, default=(0.0, 0))
        return RunResult(
            groups=tuple(group.result() for group in self._groups),
            exit_code=128 + first if first else code,
            workdir=workdir,
            exchange=self._topology.exchange or f"{workdir}/exchange",
            received=first,
        )

    def close(self) -> None:
        """Kills every process that is left and frees the ports."""
        for group in self._groups:
            if not group.over:
                group.kill()
            group.close()
        self._events.add("end", exit_code=self.result().exit_code)
        self._until_closed.close()

    def _say(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)


def _write_results(run: RunResult) -> None:
    """Writes what each group has logged last; a recipe itself writes more."""
    if (run.workdir / run_files.CONFIG).exists():
        return
    groups = []
    for ended in run.groups:
        last: dict[str, Any] = {}
        path = directory.RunDirectory(run.workdir).metrics(ended.group)
        for record in untrusted.last_records(path):
            # Another `fit` logged lines that don't belong to this one.
            same = record.get("fit") == last.get("fit")
            last = {**(last if same else {}), **record}
        groups.append(
            {
                "group": ended.group,
                "state": ended.state,
                "reason": ended.reason,
                "steps": last.get("step"),
                "examples_per_second": last.get("examples_per_second"),
                "metrics": last,
            }
        )
    if any(group["metrics"] for group in groups):
        text = json.dumps({"groups": groups}, indent=2) + "\n"
        with contextlib.suppress(OSError):
            run_files.write(run.workdir / run_files.RESULTS, [text.encode()])


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


class LaunchError(RuntimeError):
    """A group has failed; the message has the last lines of its log.

    Attributes:
        launched: The run, with the files and states of all groups.
        exit_code: What `tfdistill run` would have returned.
    """

    def __init__(self, launched: RunResult) -> None:
        found = []
        for group in launched.groups:
            if group.state == "failed":
                found.append(f"Group {group.group} failed: {group.reason}.")
                found += [f"  {line}" for line in group.last_lines]
        logs = f"All logs: {launched.workdir}/logs"
        super().__init__("\n".join([*found, logs]))
        self.launched = launched
        self.exit_code = launched.exit_code


def launch(
    command: Sequence[str],
    *,
    workdir: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> RunResult:
    """Runs a command on this machine in one or more groups and waits for it.

    While it runs, it prints lines about the groups. Ctrl-C, or a notebook's
    "interrupt", stops all tasks. TensorFlow is not loaded.

    Args:
        command: A program and its arguments, started once for each task.
        workdir: Directory of the run, for logs and results.
        env: Variables to set for each task. Default none.
        **options: The options of `tfdistill run`, by the same names, with
            the same defaults and in the same form, such as `num_groups=2`,
            `workers_per_group=2` and `max_restarts=3`.

    Returns:
        The run, if all groups are done: its `groups`, `workdir`, `exchange`
        and `metrics(group)`.

    Raises:
        TypeError: There is no such option.
        ValueError: An argument is of a wrong type or out of range, the command
            isn't a program, or the workdir is in use.
        RuntimeError: A group has failed. `error.launched` is the run, and
            `error.exit_code` what `tfdistill run` would have returned.
        KeyboardInterrupt: All tasks were stopped by Ctrl-C.

    Example:
        ```python
        run = tfdistill.launch(
            ["python", "train.py"], num_groups=2, workdir="/tmp/run"
        )
        ```
    """
    topology = local_cluster.LocalCluster(
        command=command,
        workdir=os.fspath(workdir)
        if isinstance(workdir, os.PathLike)
        else workdir,
        env={} if env is None else env,
        **options,
    )
    launched = LocalRun(topology).supervise()
    if launched.received == signal.SIGINT:
        raise KeyboardInterrupt
    if launched.received:
        raise SystemExit(launched.exit_code)
    if launched.exit_code:
        raise LaunchError(launched)
    return launched
