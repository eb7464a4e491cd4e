"""Processes that a test starts without an import of TensorFlow for each.

They are forks of a parent that conftest.py keeps, which `LocalRun` takes for
its tasks, too. A test of how Python starts, or of a launcher as a program of
its own, starts it itself.
"""

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tests.cases import tasks
from tests.cases import waits
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.launcher import parent
from tfdistill.launcher import task_process


def of(
    program: ModuleType | str,
    *arguments: object,
    cwd: pathlib.Path | None = None,
) -> tuple[str, ...]:
    """Runs a module, a script's path, or what follows "-c", in `cwd`."""
    if isinstance(program, ModuleType):
        program = program.__name__
    place = [] if cwd is None else [f"--in={cwd}"]
    words = [*place, program, *arguments]
    return (sys.executable, "-m", "tests.programs", *map(str, words))


def launched(
    workdir: pathlib.Path,
    program: ModuleType | str,
    *arguments: object,
    exit_code: int | None = 0,
    cwd: pathlib.Path | None = None,
    **cluster: Any,
) -> local_run.LocalRun:
    """Runs a program on the tasks of a cluster until all have ended.

    They must end with `exit_code`, whatever it is if None. `cluster` are
    arguments of `LocalCluster`, such as workers_per_group=2. The run has its
    `result`, and the process ids of its tasks, which are gone.
    """
    topology = local_cluster.LocalCluster(
        command=of(program, *arguments, cwd=cwd),
        workdir=str(workdir),
        **cluster,
    )
    with local_run.LocalRun(topology) as run:
        result = tasks.end(run)
    assert exit_code in (None, result.exit_code), result.groups
    assert not any(map(tasks.alive, run.pids.values()))
    return run


class Process:
    def __init__(
        self,
        command: tuple[str, ...],
        log: pathlib.Path,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Returns when it runs; `env` is added to this process' own."""
        self.args, self.log = command, log
        self.returncode: int | None = None
        env = {**os.environ, **(env or {})}
        no_fork = parent.why_not(parent.FORK, command, env)
        with parent.keep(), log.open("wb") as file:
            self._task = task_process.TaskProcess(
                command,
                env=env,
                log_file=file,
                parent=None if no_fork else parent.get(command, env),
            )
        self._until(lambda: self._task.pid is not None)

    @property
    def pid(self) -> int:
        assert self._task.pid is not None
        return self._task.pid

    def _until(self, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            sources = [self._task] if self._task.fileno() >= 0 else []
            select.select(sources, [], [], 0.2)
            self._task.read()
            return holds()

        what = " ".join(self.args)
        if not holds():
            waits.until(look, what, pause_secs=0.0)

    def poll(self) -> int | None:
        self._task.read()
        self.returncode = self._task.exit_code
        return self.returncode

    def wait(self) -> int:
        """Returns its exit code once nothing of it is left."""
        self._until(lambda: self._task.closed)
        self.returncode = self._task.exit_code
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process itself, as `os.kill` would."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills it and all that it has started; waits for the end."""
        self._task.kill()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclasses.dataclass
class Starter:
    """Starts processes whose logs are in one directory."""

    directory: pathlib.Path
    processes: list[Process] = dataclasses.field(default_factory=list)

    def __call__(
        self, program: ModuleType | str, *arguments: object, **env: str
    ) -> Process:
        log = self.directory / f"process_{len(self.processes)}.log"
        started = Process(of(program, *arguments), log, env=env)
        self.processes.append(started)
        return started


@contextlib.contextmanager
def starting(directory: pathlib.Path) -> Iterator[Starter]:
    """Gives what starts processes; none is left at the end."""
    starter = Starter(directory)
    try:
        yield starter
    finally:
        for process in starter.processes:
            process.end()


def run(
    program: ModuleType | str,
    *arguments: object,
    cwd: pathlib.Path | None = None,
) -> str:
    """Runs a program to its end, which must be a good one; returns its text."""
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "log")
        process = Process(of(program, *arguments, cwd=cwd), log)
        try:
            code = process.wait()
        finally:
            process.end()
        text = process.text()
    assert code == 0, f"{process.args} ended with {code}:\n{text}"
    return text
