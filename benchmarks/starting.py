"""Seconds to the first step of a run, and its memory, by how tasks are started.

Forks of one parent that has imported TensorFlow, and new programs, in turns:
two groups of two workers train the recipe digits, from the launcher's start to
the first step of both groups and to the end; and eight tasks are weighed, with
all that keeps them, while they train. The parts of a start are those of the
last round; `python -m benchmarks.recovery` has the same after a kill.
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import measure
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.launcher import parent
from tfdistill.status import run_events
from tfdistill.system import programs

_LIMIT_SECS = 300.0
_WEIGHED_GROUPS = 4


def _topology(
    directory: str, start: str, *, num_groups: int, num_steps: int
) -> local_cluster.LocalCluster:
    return local_cluster.LocalCluster(
        command=(
            *(sys.executable, "-m", "launch.train", "--recipe=digits"),
            *(f"--workdir={directory}", f"--override=num_steps={num_steps}"),
        ),
        workdir=directory,
        num_groups=num_groups,
        workers_per_group=2,
        start=start,
    )


def first_steps(topology: local_cluster.LocalCluster) -> list[dict[str, Any]]:
    """Returns the events of groups' first steps so far."""
    events = run_events.read(files.events_path(topology))
    return [event for event in events if event["event"] == "first_step"]


def _timed(start: str, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        topology = _topology(
            directory, start, num_groups=2, num_steps=num_steps
        )
        begin = time.monotonic()
        with local_run.LocalRun(topology) as run:
            result = run.wait(timeout_secs=_LIMIT_SECS)
        if result.exit_code:
            raise RuntimeError(f"the run failed: {result}")
        steps = first_steps(topology)
        return {
            "first_step": max(e["monotonic"] for e in steps) - begin,
            "whole": time.monotonic() - begin,
            "parts": steps[0]["secs"],
        }


def family(pid: int) -> Iterator[int]:
    """Yields the processes below one, as long as they live."""
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from family(child)


def _pss_bytes(pid: int) -> int:
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in text.splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


def _weighed(start: str) -> float:
    """Returns the proportional set size of eight tasks that train, in bytes.

    With their keepers and, if there is one, their parent.
    """
    with tempfile.TemporaryDirectory() as directory:
        topology = _topology(
            directory, start, num_groups=_WEIGHED_GROUPS, num_steps=100_000
        )
        deadline = time.monotonic() + _LIMIT_SECS
        with local_run.LocalRun(topology) as run:
            while len(first_steps(topology)) < _WEIGHED_GROUPS:
                run.poll()
                if run.over or time.monotonic() > deadline:
                    raise RuntimeError(f"the run failed: {run.result()}")
            settled = time.monotonic() + 5.0
            while time.monotonic() < settled:
                run.poll()
            return float(sum(map(_pss_bytes, family(os.getpid()))))


def _add_options(options: programs.Flags) -> None:
    options.add("rounds", "runs by each method", 5, quick=1)
    options.add("num_steps", "steps of each run", 300, quick=60)


def _run(options: programs.Options) -> int:
    with measure.one_json_line() as report:
        report["machine"] = measure.machine()
        rounds: dict[str, list[dict[str, Any]]] = {
            m: [] for m in parent.METHODS
        }
        for _ in range(options.rounds):
            for method, found in rounds.items():
                found.append(_timed(method, options.num_steps))
                measure.log(f"{method}: {found[-1]}")
        for name in ("first_step", "whole"):
            secs = {m: [r[name] for r in found] for m, found in rounds.items()}
            medians = {m: statistics.median(s) for m, s in secs.items()}
            report[f"{name}_secs"] = {
                **{m: measure.summary(s) for m, s in secs.items()},
                "ratio": medians[parent.FORK] / medians[parent.SPAWN],
            }
        report["parts_secs"] = {m: f[-1]["parts"] for m, f in rounds.items()}
        weights = {method: _weighed(method) for method in parent.METHODS}
        report["eight_tasks_bytes"] = {
            **weights,
            "ratio": weights[parent.FORK] / weights[parent.SPAWN],
        }
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.starting",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
