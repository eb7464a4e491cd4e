"""Two groups of speeds 1:2 that mix: fixed batches against `BatchScaler`.

Real processes under the launcher. The figure is the time from the first look at
a group's loss to the moment when both groups are at the target, with batches
that follow the speeds and weights of a mix by examples, over that with equal
batches and equal weights. `waiting` mixes wait for the other group, `free` ones
do not.
"""

import pathlib
import statistics
import sys
import tempfile
from typing import Any

import tfdistill
from benchmarks import measure
from benchmarks import mixing_speeds_task
from tfdistill.system import programs

_TARGET = 0.8


def _looks(workdir: str, group: int) -> list[tuple[float, float, int]]:
    path = pathlib.Path(workdir, f"group_{group}", mixing_speeds_task.LOSSES)
    lines = path.read_text("utf-8").splitlines()
    return [
        (float(when), float(loss), int(size))
        for when, loss, size in map(str.split, lines)
    ]


def _train(
    options: programs.Options, seed: int, *, scales: bool, waits: bool
) -> dict[str, Any]:
    """Runs both groups; returns when they were at the target, and how."""
    with tempfile.TemporaryDirectory() as directory:
        workdir = f"{directory}/run"
        tfdistill.launch(
            [
                *[sys.executable, "-m", "benchmarks.mixing_speeds_task"],
                f"--scales={scales}",
                f"--waits={waits}",
                f"--seed={seed}",
                f"--limit_secs={options.limit_secs}",
            ],
            workdir=workdir,
            num_groups=2,
            plain=True,
            stuck_secs=60.0,
        )
        looks = [_looks(workdir, group) for group in range(2)]
    first = min(each[0][0] for each in looks)
    reached = [
        next((t for t, loss, _ in each if loss <= options.target_loss), None)
        for each in looks
    ]
    known = [t - first for t in reached if t is not None]
    return {
        "secs": round(max(known), 3) if len(known) == 2 else None,
        "updates": [len(each) for each in looks],
        "sizes": [each[-1][2] for each in looks],
        "losses": [round(each[-1][1], 4) for each in looks],
    }


def _compare(options: programs.Options, *, waits: bool) -> dict[str, Any]:
    runs: dict[str, list[Any]] = {"fixed": [], "scaled": []}
    for seed in range(options.speed_seeds):
        for name in runs if seed % 2 else [*runs][::-1]:
            found = _train(options, seed, scales=name == "scaled", waits=waits)
            measure.log(f"seed {seed}: {name} {found}")
            runs[name].append(found)
    ratios = [
        scaled["secs"] / fixed["secs"]
        for scaled, fixed in zip(runs["scaled"], runs["fixed"], strict=True)
        if scaled["secs"] and fixed["secs"]
    ]
    median = round(statistics.median(ratios), 3) if ratios else None
    return {"ratio": median, "ratios": [round(r, 3) for r in ratios], **runs}


def speeds(options: programs.Options) -> dict[str, Any]:
    """Compares the times to the target, with and without waiting."""
    waiting = _compare(options, waits=True)
    free = _compare(options, waits=False)
    ratio = waiting["ratio"]
    return {
        "met": ratio is not None and ratio <= _TARGET,
        "at_most": _TARGET,
        "waiting": waiting,
        "free": free,
    }


def add_options(options: programs.Flags) -> None:
    """Adds the options of this part."""
    options.add("target_loss", "on the test images", 0.35)
    options.add("limit_secs", "of each training", 60.0, quick=20.0)
    options.add("speed_seeds", "trainings of each kind", 3, quick=1)
