"""Four groups under a fault every half minute: what of their time is lost?

Starts groups that train at a steady pace, injects faults into them at random
times, and waits for their end. Throughout, it checks that versions are complete
and never go backwards, that teachers are complete versions, that losses are
finite and that groups recover while others continue. What was lost is counted
from the steps that the tasks note themselves. Prints one line of JSON.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from benchmarks import measure
from benchmarks import soak_task
from benchmarks.punish import faults as faults_lib
from benchmarks.punish import round as round_lib
from benchmarks.punish import run_view
from tfdistill.status import goodput
from tfdistill.system import programs

# The least goodput, from what mean time between faults on.
_LEAST_GOODPUT = {30.0: 0.95, 0.0: 0.9}
_LONGEST_GAP_SECS = 1.0
_MAX_RESTARTS = 1000
# For the groups' start, beside the time with faults.
_SPARE_SECS = 30.0
_FAULTS = ("kill", "kill_group", "stop", "term", "disk_full", "corrupt")
_START_LIMIT_SECS = 300.0
_END_LIMIT_SECS = 1200.0


class Step(NamedTuple):
    """A step that a worker noted: its process, the number and Unix seconds."""

    pid: int
    number: int
    time: float


def read_steps(path: pathlib.Path) -> list[Step]:
    """Returns what a worker noted, over all its starts."""
    lines = path.read_text().split("\n")[:-1]
    return [
        Step(int(pid), int(number), float(when))
        for pid, number, when in map(str.split, lines)
    ]


def launch(
    workdir: pathlib.Path,
    launcher_flags: Sequence[str],
    task_flags: Sequence[str],
) -> subprocess.Popen:
    """Starts groups of `soak_task` that are restarted whenever they fail."""
    temporary = workdir / "tmp"
    temporary.mkdir(parents=True)
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        *launcher_flags,
        f"--max_restarts={_MAX_RESTARTS}",
        *["--on_group_failure=continue", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task", *task_flags],
    ]
    with (workdir / "launcher.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=pathlib.Path(__file__).resolve().parent.parent,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _launch(
    options: programs.Options, workdir: pathlib.Path
) -> subprocess.Popen:
    launcher_flags = [
        f"--num_groups={options.num_groups}",
        f"--workers_per_group={options.workers_per_group}",
    ]
    if options.exchange:  # Each run has a place of its own.
        place = f"{options.exchange.rstrip('/')}/{workdir.name}"
        launcher_flags.append(f"--exchange={place}")
    task_flags = [
        f"--num_steps={_num_steps(options)}",
        f"--steps_per_second={options.steps_per_second}",
        f"--seed={options.seed}",
        f"--by={options.by}",
    ]
    return launch(workdir, launcher_flags, task_flags)


def _num_steps(options: programs.Options) -> int:
    # Restarts make groups end later than this, when the faults are over.
    secs = options.minutes * 60 + _SPARE_SECS
    return 100 * max(1, round(secs * options.steps_per_second / 100))


def view_of(workdir: pathlib.Path) -> run_view.RunView:
    """Returns a view of a run that has just been launched."""
    deadline = time.monotonic() + _START_LIMIT_SECS
    while True:
        try:
            return run_view.RunView(str(workdir))
        except run_view.NoRunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _punish(options: programs.Options, workdir: pathlib.Path) -> dict[str, Any]:
    return round_lib.Round(view_of(workdir), options, measure.log).run()


class _Timeline:
    """When a group stepped, as its first worker noted it.

    Attributes:
        lines: What the worker noted, in order.
        good: The spans of time in which the group made new steps: between two
            steps of one process, the second of which was never made before,
            and not more than a second after the first.
        num_new: New steps within the time that is counted.
    """

    def __init__(self, path: pathlib.Path, start: float, end: float) -> None:
        """Reads the file; counts from `start` to `end`, in Unix seconds."""
        self.lines = read_steps(path)
        self.good: list[tuple[float, float]] = []
        self.num_new, furthest = 0, 0
        self._start, self._end = start, end
        for (pid, _, then), (other, step, now) in itertools.pairwise(
            self.lines
        ):
            if step > furthest and start < now <= end:
                self.num_new += 1
                if pid == other and now - then <= _LONGEST_GAP_SECS:
                    self.good.append((max(start, then), now))
            furthest = max(furthest, step)

    @property
    def good_secs(self) -> float:
        """How long the group made new steps."""
        return sum(last - first for first, last in self.good)

    def outages(self) -> list[tuple[float, float]]:
        """Returns the spans in which it made none."""
        edges = [self._start, *itertools.chain(*self.good), self._end]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in pairs if last > first]

    def longest_gap(self, faults: Sequence[Mapping[str, Any]]) -> float:
        """Returns the longest time without a step, nor a fault.

        A group has a fault until it makes a new step.
        """
        hit = []
        for fault in faults:
            over = fault["time"] + fault["secs"]
            ends = (last for _, last in self.good if last > over)
            hit.append((fault["time"], next(ends, self._end)))
        return max(
            now - then
            for (_, _, then), (_, _, now) in itertools.pairwise(self.lines)
            if self._start <= then
            and now <= self._end
            and not any(first <= now and then <= last for first, last in hit)
        )


def _count(
    options: programs.Options, workdir: pathlib.Path, report: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what the tasks' own steps say of the time with faults."""
    start, secs = report["start"], report["secs"]
    text = (workdir / "punish" / "log.jsonl").read_text()
    faults = [json.loads(line) for line in text.splitlines()]
    halting = [fault for fault in faults if fault["halts"]]
    steps = soak_task.STEPS.format(0)
    good, num_new, longest = 0.0, 0, 0.0
    outages = collections.defaultdict[str, list[float]](list)
    for group in range(options.num_groups):
        path = workdir / f"group_{group}" / steps
        line = _Timeline(path, start, start + secs)
        own = [fault for fault in halting if fault["group"] == group]
        good += line.good_secs
        num_new += line.num_new
        longest = max(longest, line.longest_gap(own))
        for first, last in line.outages():
            # The fault's time is taken before it is injected.
            names = [f["fault"] for f in own if first - 1 <= f["time"] <= last]
            if names or last - first > _LONGEST_GAP_SECS:
                outages["+".join(names) or "none"].append(last - first)
    before, after = (
        sum(
            goodput.of_groups(
                workdir, range(options.num_groups), until=until
            ).values(),
            goodput.Goodput(),
        )
        for until in (start, start + secs)
    )
    lost = {name: after.lost[name] - before.lost[name] for name in after.lost}
    told = goodput.Goodput(after.good - before.good, lost)
    due = options.steps_per_second * secs * options.num_groups
    return {
        "goodput": good / secs / options.num_groups,
        "of_the_library": told.to_json(),
        # Less than goodput if steps took longer, as on a busy machine.
        "steps_of_due": num_new / due,
        "longest_step_gap_secs": longest,
        # By the faults that came in it, in their order.
        "outage_secs": {
            name: measure.summary(found)
            for name, found in sorted(outages.items())
        },
    }


def _equal_workers(options: programs.Options, workdir: pathlib.Path) -> bool:
    """Whether the workers of each group ended with the same weights."""
    found = [
        {
            path.read_text() if path.exists() else str(path)
            for path in (
                workdir / f"group_{group}" / soak_task.DIGEST.format(worker)
                for worker in range(options.workers_per_group)
            )
        }
        for group in range(options.num_groups)
    ]
    return all(len(digests) == 1 for digests in found)


def _left_over(workdir: pathlib.Path) -> dict[str, list[str]]:
    """Returns what a run should not leave: processes and unfinished files."""
    found = run_view.processes_of(workdir)
    # What a killed publisher was writing stays for the lease of an hour.
    drafts = [*workdir.glob("**/.trash-*"), *(workdir / "tmp").glob("tf*")]
    return {
        "processes": [str(process.pid) for process in found],
        "temporary_files": [str(path) for path in drafts],
    }


def _soak(options: programs.Options, root: pathlib.Path) -> dict[str, Any]:
    workdir = root / "soak"
    launcher = _launch(options, workdir)
    try:
        report = _punish(options, workdir)
        exit_code = launcher.wait(timeout=_END_LIMIT_SECS)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(timeout=60)
    return {
        **report,
        **_count(options, workdir, report),
        "equal_workers": _equal_workers(options, workdir),
        "exit_code": exit_code,
        "left_over": _left_over(workdir),
    }


def _least_goodput(mtbf_secs: float) -> float:
    return next(
        least for secs, least in _LEAST_GOODPUT.items() if mtbf_secs >= secs
    )


def _add_options(options: programs.Program) -> None:
    add = options.add
    add("workdir", "<DIR>: kept; default: a temporary directory, removed")
    add(
        "exchange",
        "<URL>: an empty place in an object store, such as s3://bucket/soak; "
        "kept. Default: in the workdir",
    )
    add(
        "faults",
        f"<NAME,...>: kinds of faults, of {', '.join(faults_lib.FAULTS)}",
        ",".join(_FAULTS),
    )
    add(
        "by",
        "how groups teach each other",
        "versions",
        enum_values=["versions", "predictions", "weights", "fragments"],
    )
    for name, default, text, quick in (
        ("minutes", 30.0, "length of the time with faults", 1.0),
        ("mtbf_secs", 30.0, "mean time between two faults", 15.0),
        ("steps_per_second", 5.0, "pace of the groups", None),
        ("num_groups", 4, "groups that train", 2),
        ("workers_per_group", 2, "workers in each group", 1),
        ("seed", 0, "the same seed gives the same faults", None),
    ):
        add(name, text, default, quick=quick)


def _run(options: programs.Options, record: dict[str, Any]) -> None:
    unknown = sorted(set(options.faults.split(",")) - set(faults_lib.FAULTS))
    if unknown:
        raise programs.UsageError(
            f"--faults must be some of {', '.join(faults_lib.FAULTS)}; "
            f"received {', '.join(unknown)}"
        )
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(
            options.workdir
            or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tfdistill-soak-")
            )
        ).resolve()
        found = _soak(options, root)
    goodput = measure.judge(
        found["goodput"], at_least=_least_goodput(options.mtbf_secs)
    )
    gap = measure.judge(
        found["longest_step_gap_secs"], at_most=_LONGEST_GAP_SECS
    )
    clean = found["equal_workers"] and not (
        found["exit_code"]
        or found["violations"]
        or any(found["left_over"].values())
    )
    record |= {
        "benchmark": "soak",
        "by": options.by,
        "goodput": goodput,
        "longest_step_gap": gap,
        "clean": clean,
        "met": goodput["met"] and gap["met"] and clean,
        "round": found,
        "machine": measure.machine(),
    }


PROGRAM = measure.program("soak", __doc__, define=_add_options, run=_run)

if __name__ == "__main__":
    PROGRAM.start()
