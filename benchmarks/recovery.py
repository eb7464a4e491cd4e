"""What a recovery takes, part by part, after a task dies, freezes or hangs.

Two groups of two workers, then one group with a parameter server, train as in
the soak; group 0 is broken in one way after the other. A recovery lasts until
the group makes a step that it had not made before. The longest pause of group 1
meanwhile, on a machine that starts processes at the same time, is reported
beside its longest pause without faults.
"""

import itertools
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks import soak
from benchmarks import soak_task
from benchmarks.punish import run_view
from tfdistill.launcher import parent
from tfdistill.launcher import restarts
from tfdistill.status import run_events
from tfdistill.system import programs

_LIMIT_SECS = 300.0
_TASK_FLAGS = ("--num_steps=100000000", "--steps_per_second=5")
# By kind, the event that tells of it, and the most seconds until then.
_KINDS = {"dead": ("exit", 1.0), "frozen": ("frozen", 5.0)}
_KINDS["stuck"] = ("stuck", 10.0)


def _until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _LIMIT_SECS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError("The run did not go on.")
        time.sleep(0.05)
    return found


class _BrokenGroup:
    """Group 0 of a run in progress, and the faults it is given."""

    def __init__(self, view: run_view.RunView) -> None:
        self._view = view

    def steps(self, group: int = 0) -> list[soak.Step]:
        """Returns the steps that a group's chief has noted."""
        path = self._view.group_dir(group) / soak_task.STEPS.format(0)
        return soak.read_steps(path) if path.exists() else []

    def rest(self) -> float:
        """Lets it train until a restart isn't delayed; returns since when."""
        begin = time.time()
        wanted = len(self.steps()) + 1
        _until(lambda: len(self.steps()) > wanted)
        time.sleep(restarts.HEALTHY_SECS)
        return begin

    def recover(self, kind: str, victim: str) -> dict[str, float]:
        """Breaks a task; returns the seconds of each part of the recovery."""
        pid, begin = self.steps()[-1][0], time.time()
        if kind == "stuck":
            (self._view.workdir / soak_task.HANG.format(victim)).touch()
        else:
            number = signal.SIGKILL if kind == "dead" else signal.SIGSTOP
            tasks = {task.name: task for task in self._view.tasks(0)}
            tasks[victim].process.send_signal(number)
        _until(lambda: self._new_steps(pid))
        events = run_events.read(self._view.workdir / "logs" / run_events.NAME)
        events = [e for e in events if e["time"] > begin and e["group"] == 0]

        def first(name: str) -> float:
            return next(e["time"] for e in events if e["event"] == name)

        path = self._view.group_dir(0) / soak_task.PHASES
        marks = [line.split() for line in path.read_text().splitlines()]
        later = [(when, step) for who, step, when in self.steps() if who != pid]
        ends = {
            "detection": first(_KINDS[kind][0]),
            "end_of_others": first("start"),
            **{n: float(t) for n, t in marks if float(t) > begin},
            "first_step": next(when for when, _ in later if when > begin),
            "repeated_steps": self._new_steps(pid)[0],
        }
        pairs = itertools.pairwise([begin, *ends.values()])
        parts = [after - before for before, after in pairs]
        return dict(zip(ends, parts, strict=True))

    def _new_steps(self, pid: int) -> list[float]:
        """Returns when steps were made that the process `pid` had not made."""
        steps = self.steps()
        last = max(i for i, (who, _, _) in enumerate(steps) if who == pid)
        furthest = max(step for _, step, _ in steps[: last + 1])
        return [when for _, step, when in steps[last:] if step > furthest]


def _measured(
    victims: Mapping[str, str], rounds: int, flags: Sequence[str]
) -> dict[str, Any]:
    """Breaks a run in each way, a number of times; `victims` are by kind."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in victims}
    with tempfile.TemporaryDirectory() as directory:
        workdir = pathlib.Path(directory, "run")
        launcher = soak.launch(workdir, flags, _TASK_FLAGS)
        try:
            group = _BrokenGroup(soak.view_of(workdir))
            _until(group.steps)
            group.rest()
            quiet, begin = group.rest(), time.time()
            for kind, victim in list(victims.items()) * rounds:
                parts = group.recover(kind, victim)
                measure.log(f"{kind}: {parts}")
                found[kind].append(parts)
                group.rest()
            others = group.steps(1)
        finally:
            launcher.terminate()
            launcher.wait()
    result: dict[str, Any] = {k: _summary(k, v) for k, v in found.items()}
    if others:
        result["other_group_longest_gap_secs"] = {
            "quiet": _longest_gap(others, quiet, begin),
            "under_faults": _longest_gap(others, begin, time.time()),
        }
    return result


def _longest_gap(
    steps: Sequence[soak.Step], since: float, until: float
) -> float:
    times = [when for _, _, when in steps if since <= when <= until]
    return max(b - a for a, b in itertools.pairwise(times))


def _summary(kind: str, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    total = [sum(parts.values()) for parts in found]
    detection = statistics.median(parts["detection"] for parts in found)
    return {
        "recovery_secs": measure.summary(total),
        "median_secs_of_parts": {
            name: round(statistics.median(p[name] for p in found), 3)
            for name in found[0]
        },
        "detected_in_time": detection <= _KINDS[kind][1],
    }


def _add_options(options: programs.Program) -> None:
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


def _run(options: programs.Options, record: dict[str, Any]) -> None:
    start, rounds = f"--start={options.start}", options.rounds
    victims = dict.fromkeys(options.kinds, "group_0_worker_1")
    flags = [start, "--workers_per_group=2"]
    record["machine"] = measure.machine()
    record["workers"] = _measured(victims, rounds, [*flags, "--num_groups=2"])
    victims = dict.fromkeys(options.kinds, "group_0_ps_0")
    if "stuck" in victims:  # A server makes no steps.
        victims["stuck"] = "group_0_chief_0"
    flags += ["--ps_per_group=1", "--num_groups=1"]
    record["parameter_servers"] = _measured(victims, rounds, flags)


PROGRAM = measure.program("recovery", __doc__, define=_add_options, run=_run)

if __name__ == "__main__":
    PROGRAM.start()
