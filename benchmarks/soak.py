"""Three groups under a fault every half minute: does training hold out?

Starts groups that train at a steady pace, injects faults into them as
`python -m benchmarks.punish` does, waits for their end, and trains the same
without faults to know how far apart retrains are. Prints one line of JSON.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks import soak_task
from benchmarks.punish import faults
from benchmarks.punish import round as round_lib
from benchmarks.punish import run_view
from tfdistill.system import programs

# Of the steps that groups without a fault make where there are no faults.
_LEAST_STEPS = 0.98
_LONGEST_GAP_SECS = 1.0
_MAX_RESTARTS = 1000
_START_LIMIT_SECS = 300.0
_END_LIMIT_SECS = 1200.0


def _launch(
    options: programs.Options,
    workdir: pathlib.Path,
    *,
    seed: int,
    steps_per_second: float,
) -> subprocess.Popen:
    temporary = workdir / "tmp"
    temporary.mkdir(parents=True)
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        f"--num_groups={options.num_groups}",
        f"--workers_per_group={options.workers_per_group}",
        *_exchange(options, workdir),
        f"--max_restarts={_MAX_RESTARTS}",
        *["--on_group_failure=continue", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task"],
        f"--num_steps={_num_steps(options)}",
        f"--steps_per_second={steps_per_second}",
        f"--seed={seed}",
        f"--by={options.by}",
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


def _exchange(options: programs.Options, workdir: pathlib.Path) -> list[str]:
    """Returns the launcher's option: a place of its own for each run."""
    if not options.exchange:
        return []
    return [f"--exchange={options.exchange.rstrip('/')}/{workdir.name}"]


def _num_steps(options: programs.Options) -> int:
    # Restarts make groups end later than this, when the faults are over.
    secs = options.minutes * 60 + options.calm_secs
    return 100 * max(1, round(secs * options.steps_per_second / 100))


def _punish(options: programs.Options, workdir: pathlib.Path) -> dict[str, Any]:
    deadline = time.monotonic() + _START_LIMIT_SECS
    while True:
        try:
            view = run_view.RunView(str(workdir))
            break
        except run_view.NoRunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    return round_lib.Round(
        view,
        round_lib.Options(
            faults=options.faults.split(","),
            seed=options.seed,
            minutes=options.minutes,
            every_secs=options.every_secs,
            calm_secs=options.calm_secs,
        ),
        measure.log,
    ).run()


def _qualities(
    options: programs.Options, workdir: pathlib.Path
) -> list[dict[str, float]]:
    paths = [
        workdir / f"group_{group}" / soak_task.QUALITY
        for group in range(options.num_groups)
    ]
    return [json.loads(path.read_bytes()) for path in paths if path.exists()]


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
    launcher = _launch(
        options,
        workdir,
        seed=options.seed,
        steps_per_second=options.steps_per_second,
    )
    try:
        report = _punish(options, workdir)
        exit_code = launcher.wait(timeout=_END_LIMIT_SECS)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(timeout=60)
    return {
        **report,
        "exit_code": exit_code,
        "left_over": _left_over(workdir),
        "qualities": _qualities(options, workdir),
    }


def _without_faults(
    options: programs.Options, root: pathlib.Path
) -> list[dict[str, float]]:
    found = []
    for trial in range(options.trials):
        measure.log(f"without faults: trial {trial + 1} of {options.trials}")
        workdir = root / f"calm_{trial}"
        launcher = _launch(
            options, workdir, seed=options.seed + trial, steps_per_second=0.0
        )
        if launcher.wait(timeout=_END_LIMIT_SECS):
            raise RuntimeError(f"failed without faults: {workdir}/launcher.log")
        found += _qualities(options, workdir)
    return found


def _compare(
    soaked: Sequence[dict[str, float]], calm: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Says whether the quality is within three deviations of retrains."""
    values = [found["accuracy"] for found in calm]
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    ours = [found["accuracy"] for found in soaked]
    return {
        "accuracy": ours,
        "without_faults": {"mean": mean, "deviation": deviation, "all": values},
        "within_noise": bool(ours)
        and abs(statistics.mean(ours) - mean) <= 3 * max(deviation, 0.002),
    }


def _add_options(options: programs.Flags) -> None:
    add = options.add
    add("workdir", "<DIR>: kept; default: a temporary directory, removed")
    add(
        "exchange",
        "<URL>: an empty place in an object store, such as s3://bucket/soak; "
        "kept. Default: in the workdir",
    )
    add(
        "faults",
        "<NAME,...>: kinds of faults; default: all",
        ",".join(faults.FAULTS),
    )
    add(
        "by",
        "how groups teach each other",
        "versions",
        enum_values=["versions", "predictions", "weights"],
    )
    for name, default, text, quick in (
        ("minutes", 30.0, "length of the time with faults", 1.0),
        ("every_secs", 30.0, "mean time between two faults", 15.0),
        ("calm_secs", 60.0, "time before, to measure the paces", 15.0),
        ("steps_per_second", 5.0, "pace of the groups", None),
        ("num_groups", 3, "groups that train", 2),
        ("workers_per_group", 2, "workers in each group", 1),
        ("trials", 2, "runs without faults, to compare with", 1),
        ("seed", 0, "the same seed gives the same faults", None),
    ):
        add(name, text, default, quick=quick)


def _run(options: programs.Options) -> int:
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(measure.one_json_line())
        root = pathlib.Path(
            options.workdir
            or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tfdistill-soak-")
            )
        ).resolve()
        found = _soak(options, root)
        calm = _without_faults(options, root)
        quality = _compare(found.pop("qualities"), calm)
        steps = measure.judge(
            found["steps_of_groups_without_fault"], at_least=_LEAST_STEPS
        )
        clean = not (
            found["exit_code"]
            or found["violations"]
            or any(found["left_over"].values())
        )
        record |= {
            "benchmark": "soak",
            "steps": steps,
            "longest_step_gap": measure.judge(
                found["longest_step_gap_secs"], at_most=_LONGEST_GAP_SECS
            ),
            "quality": quality,
            "clean": clean,
            "met": steps["met"] and clean and quality["within_noise"],
            "round": found,
            "machine": measure.machine(),
        }
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.soak",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
