"""Carries out runs, several at a time, and resumes if it was stopped.

Imports neither TensorFlow nor Keras.

Two trials that need the same training share one run: an ensemble's first
member is the independent group of the same seed.
"""

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdistill.cluster import signs
from tfdistill.comparison import trials
from tfdistill.launcher import local_cluster
from tfdistill.recipes import outputs
from tfdistill.system import untrusted

if TYPE_CHECKING:
    from tfdistill.launcher import local_run

Run = trials.Run
RUNS = "runs"
# Wrong options and wrong data: of these no other run knows better.
_EXITS_OF_ALL = (2, 65)
_MAX_TRIES = 3


@dataclasses.dataclass
class _Active:
    run: Run
    process: "local_run.LocalRun"
    start: float
    tries: int


# Starts the processes of a run.
Launch = Callable[[local_cluster.LocalCluster], "local_run.LocalRun"]


def launch(topology: local_cluster.LocalCluster) -> "local_run.LocalRun":
    """Starts them with this machine's launcher."""
    # Only here: --help is answered without what a launcher takes.
    from tfdistill.launcher import local_run

    return local_run.LocalRun(topology)


class Runner:
    """Carries out runs below one directory."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        num_at_once: int = 1,
        say: Callable[[str], None] = print,
        launch: Launch = launch,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Starts nothing yet; `say` takes a line of progress.

        `names` has a name for some runs, by their keys.
        """
        self._names = names or {}
        self._workdir = workdir
        self._num_at_once = num_at_once
        self._say = say
        self._launch = launch
        self._active: list[_Active] = []
        self._seconds: list[float] = []
        self._num_done = 0
        self._refused = False
        self._failures: dict[str, str] = {}

    def directory(self, run: Run) -> pathlib.Path:
        """Returns where a run's files are."""
        return self._workdir / RUNS / run.key

    def is_done(self, run: Run) -> bool:
        """Whether a run has come to its end, now or earlier."""
        return (self.directory(run) / outputs.RESULTS).exists()

    def run_all(self, runs: Sequence[Run]) -> dict[str, str]:
        """Carries out the runs that are not done yet.

        Teachers come before their students. Returns, by the key of each run
        that failed or that a failed one was to teach, why.
        """
        waiting = {run.key: run for run in runs if not self.is_done(run)}
        total = len(waiting)
        self._failures, self._num_done = {}, len(runs) - total
        if self._num_done:
            self._say(f"{self._num_done} of {len(runs)} runs are done")
        try:
            while waiting or self._active:
                self._start_some(waiting, total)
                for active in list(self._active):
                    active.process.poll(0.1)
                    if active.process.over:
                        active.process.poll(0)
                        self._end(active)
                if self._refused and waiting:
                    self._say(
                        f"the first run failed, and the other {len(waiting)} "
                        "would fail the same way: they weren't started"
                    )
                    waiting.clear()
        finally:
            for active in self._active:  # Ends their processes.
                active.process.close()
            self._active.clear()
        return self._failures

    def _start_some(self, waiting: dict[str, Run], total: int) -> None:
        for key, run in list(waiting.items()):
            teacher = run.teacher
            if teacher is not None and teacher.key in self._failures:
                self._failures[key] = f"its teacher {teacher.key} failed"
                del waiting[key]
                continue
            ready = teacher is None or self.is_done(teacher)
            if len(self._active) < self._num_at_once and ready:
                del waiting[key]
                number, left = total - len(waiting), ""
                if self._seconds:
                    mean = sum(self._seconds) / len(self._seconds)
                    secs = mean * (total - number + 1) / self._num_at_once
                    left = f"; about {max(secs / 60, 1):.0f} min left"
                name = self._names.get(key, run.recipe.method)
                self._say(
                    f"[{number}/{total}] {name}, {run.num_groups} x "
                    f"{run.workers_per_group} workers, in {RUNS}/{key}{left}"
                )
                self._start(run, tries=1)

    def _start(self, run: Run, *, tries: int) -> None:
        directory = self.directory(run)
        if directory.exists() and not run.ps_per_group:
            # Interrupted. Groups with parameter servers resume from a backup.
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        chosen, path = run.recipe, directory / "recipe.json"
        if run.teacher is not None:
            teacher = outputs.last_export(self.directory(run.teacher), 0)
            chosen = chosen.changed({"method.saved_model": str(teacher)})
        path.write_text(chosen.to_json())
        topology = local_cluster.LocalCluster(
            command=[sys.executable, *chosen.program(path)],
            env=chosen.environ,
            workdir=str(directory),
            num_groups=run.num_groups,
            workers_per_group=run.workers_per_group,
            ps_per_group=run.ps_per_group,
        )
        process = self._launch(topology)
        self._active.append(
            _Active(run, process.__enter__(), time.monotonic(), tries)
        )

    def _end(self, active: _Active) -> None:
        run, result = active.run, active.process.result()
        active.process.close()
        self._active.remove(active)
        code, why = result.exit_code, ""
        if code == 0:
            why = run.recipe.finish(self.directory(run), run.num_groups)
        if code == 0 and self.is_done(run):
            self._seconds.append(time.monotonic() - active.start)
            self._num_done += 1
        elif code == signs.EXIT_RETRY and active.tries < _MAX_TRIES:
            self._say(f"{run.key} lost a task; it starts again")
            self._start(run, tries=active.tries + 1)
        else:
            of_all = run.recipe.is_script or code in _EXITS_OF_ALL
            self._refused |= not self._num_done and of_all
            reasons = "; ".join(g.reason for g in result.groups if g.reason)
            why = why or f"exit code {code}: {reasons}"
            logs = f"logs: {self.directory(run) / 'logs'}"
            self._failures[run.key] = f"{why.rstrip('.')}; {logs}"
            shown = _last_lines(result)
            # A traceback ends with the reason.
            is_shown = bool(shown) and untrusted.one_line(shown[-1]) in why
            self._say(
                f"{run.key}: exit code {code}; {logs}"
                if is_shown
                else f"{run.key}: {self._failures[run.key]}"
            )
            for line in shown:
                self._say(f"  {line}")


def _last_lines(result: "local_run.RunResult") -> list[str]:
    """Returns what the tasks logged last that failed, each reason once."""
    found: dict[str, Sequence[str]] = {}
    for group in result.groups:
        if group.failed_task and group.last_lines:
            found.setdefault(group.last_lines[-1], group.last_lines)
    return [line for lines in found.values() for line in lines]
