"""Seconds to notice a task that is dead, frozen or stuck, and to come back.

Two groups of two workers, then one group with a parameter server, train a tiny
model under the launcher; group 0 is broken in one way after the other. The
worst pause of group 1 meanwhile, on a machine that starts processes at the same
time, is reported beside its worst pause without faults.
"""

import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks import recovery_task
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.launcher import parent
from tfdistill.launcher import restarts
from tfdistill.status import run_events
from tfdistill.system import programs

_LIMIT_SECS = 300.0
_STEPS_BETWEEN = 60
_KINDS = ("dead", "frozen", "stuck")
# By kind, the event that tells of it.
_EVENTS = {"dead": "exit", "frozen": "frozen", "stuck": "stuck"}
_TARGETS = {"dead": 1.0, "frozen": 5.0, "stuck": 10.0, "recovery": 10.0}


class BrokenRun:
    """A run in progress, and the faults it is given."""

    def __init__(
        self, run: local_run.LocalRun, topology: local_cluster.LocalCluster
    ) -> None:
        """Watches a run.

        Args:
            run: The run.
            topology: What it runs.
        """
        self._run = run
        self._topology = topology

    def steps(self, group: int) -> list[tuple[int, float]]:
        """Returns the steps of a group so far, with their times."""
        name = f"group_{group}_steps.txt"
        path = pathlib.Path(self._topology.workdir, name)
        text = path.read_text("utf-8") if path.exists() else ""
        lines = text.split("\n")[:-1]
        return [(int(n), float(t)) for n, t in map(str.split, lines)]

    def await_steps(self) -> None:
        """Lets group 0 train for long enough to be restarted without delay."""
        wanted = len(self.steps(0)) + _STEPS_BETWEEN
        healthy = time.monotonic() + restarts.HEALTHY_SECS
        self._until(
            lambda: len(self.steps(0)) >= wanted and time.monotonic() > healthy
        )

    def breaks(self, kind: str, task: str) -> dict[str, float]:
        """Breaks a task of group 0, and waits until the group is past it.

        Args:
            kind: One of `_KINDS`.
            task: Its name.

        Returns:
            Seconds to detection and recovery, and the steps done again.
        """
        steps = self.steps(0)
        failing, begin = steps[-1][0] + 1, time.monotonic()
        if kind == "stuck":
            pathlib.Path(self._topology.workdir, f"{task}.hang").touch()
        else:
            number = signal.SIGKILL if kind == "dead" else signal.SIGSTOP
            os.kill(self._run.pids[task], number)
        self._until(lambda: self._told(kind, begin) is not None)
        detected = self._told(kind, begin) or 0.0
        self._until(
            lambda: any(
                n > failing and t > detected for n, t in self.steps(0)[-50:]
            )
        )
        after = [(n, t) for n, t in self.steps(0) if t > detected]
        past = next(t for n, t in after if n > failing)
        return {
            "detection": detected - begin,
            "recovery": past - begin,
            "steps_redone": float(failing - after[0][0]),
        }

    def _told(self, kind: str, since: float) -> float | None:
        path = files.events_path(self._topology)
        for event in run_events.read(path):
            late = event["monotonic"] > since
            if event["event"] == _EVENTS[kind] and late:
                return float(event["monotonic"])
        return None

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_SECS
        while not condition():
            if self._run.over or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the run did not go on: {self._run.result()}"
                )
            self._run.poll(0.02)


def longest_gap(
    steps: Sequence[tuple[int, float]], *, since: float, until: float
) -> float:
    """Returns the longest pause between two steps of a period."""
    times = [when for _, when in steps if since <= when <= until]
    return max(b - a for a, b in zip(times, times[1:], strict=False))


def measure_strategy(
    victims: dict[str, str], rounds: int, **fields: Any
) -> Any:
    """Breaks a run in each way, a number of times.

    Args:
        victims: The task to break, by kind of fault.
        rounds: How often each.
        **fields: Of the `LocalCluster`.

    Returns:
        The figures by kind, and the longest pauses of group 1 if there is one.
    """
    found: dict[str, Any] = {kind: [] for kind in victims}
    with tempfile.TemporaryDirectory() as directory:
        topology = local_cluster.LocalCluster(
            command=(sys.executable, "-m", "benchmarks.recovery_task"),
            workdir=directory,
            max_restarts=100,
            **fields,
        )
        with local_run.LocalRun(topology) as run:
            broken = BrokenRun(run, topology)
            broken.await_steps()
            quiet = time.monotonic()
            broken.await_steps()
            begin = time.monotonic()
            for _ in range(rounds):
                for kind, task in victims.items():
                    figures = broken.breaks(kind, task)
                    measure.log(f"{kind}: {figures}")
                    found[kind].append(figures)
                    broken.await_steps()
            end = time.monotonic()
            others = broken.steps(1)
            run.interrupt()
            run.wait(timeout_secs=60)
    result = {kind: _summary(kind, values) for kind, values in found.items()}
    if others:
        result["other_group_longest_gap_secs"] = {
            "quiet": longest_gap(others, since=quiet, until=begin),
            "under_faults": longest_gap(others, since=begin, until=end),
        }
    return result


def _summary(kind: str, values: Sequence[dict[str, float]]) -> dict[str, Any]:
    detection = [value["detection"] for value in values]
    recovery = [value["recovery"] for value in values]
    return {
        "detection_secs": measure.summary(detection),
        "recovery_secs": measure.summary(recovery),
        "steps_redone": max(value["steps_redone"] for value in values),
        "detected_in_time": statistics.median(detection) <= _TARGETS[kind],
        "restart_secs": measure.summary(
            [r - d for r, d in zip(recovery, detection, strict=True)]
        ),
    }


def _add_options(options: programs.Flags) -> None:
    options.add("rounds", "faults of each kind", 3, quick=1)
    options.add(
        "start",
        "how the launcher starts tasks",
        parent.FORK,
        enum_values=list(parent.METHODS),
    )
    options.add(
        "kinds",
        "what happens to a task",
        list(_KINDS),
        enum_values=list(_KINDS),
        quick=["dead", "frozen"],
    )


def _run(options: programs.Options) -> int:
    rounds = options.rounds
    with measure.one_json_line() as report:
        report["machine"] = measure.machine()
        report["backup_steps"] = recovery_task.BACKUP_STEPS
        report["targets_secs"] = _TARGETS
        report["workers"] = measure_strategy(
            dict.fromkeys(options.kinds, "group_0_worker_1"),
            rounds,
            num_groups=2,
            workers_per_group=2,
            start=options.start,
        )
        victims = dict.fromkeys(options.kinds, "group_0_ps_0")
        if "stuck" in victims:  # A server makes no steps.
            victims["stuck"] = "group_0_chief_0"
        report["parameter_servers"] = measure_strategy(
            victims,
            rounds,
            workers_per_group=2,
            ps_per_group=1,
            start=options.start,
        )
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.recovery",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
