"""One turn of the parameter-server benchmark: a cluster, from start to end."""

import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks import click_training
from benchmarks import parameter_server_task
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.system import programs

# Marks a side whose tasks keep TensorFlow's number of threads.
TF_THREADS = "@tf_threads"


def take(
    name: str, options: programs.Options, *, setting: str
) -> dict[str, Any]:
    """Trains one side in processes of its own.

    Args:
        name: A side such as `"tfdistill_x10"`, with `TF_THREADS` behind it
            or not. Workers and parameter servers have tfdistill's number of
            threads without it.
        options: Of the command line.
        setting: Key of `click_training.SETTINGS`.

    Returns:
        What the side measured; and `resident_bytes`, the last known memory
        of each task by its type, the largest of the tasks of one type.

    Raises:
        RuntimeError: It failed.
    """
    text, _, threads = name.partition("@")
    side = parameter_server_task.Side.of(text)
    number = click_training.SETTINGS[setting].num_workers
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as workdir:
        topology = local_cluster.LocalCluster(
            command=_command(text, setting, options),
            workdir=workdir,
            workers_per_group=1 if side.is_alone else number,
            ps_per_group=0 if side.is_alone else number,
            env=_environ(own_threads=bool(threads)),
            worker_restarts=0,
        )
        with local_run.LocalRun(topology) as running:
            memory = _watch(running, timeout_secs=options.turn_timeout_secs)
            (group,) = running.result().groups
        if group.state != "done":
            lines = "\n".join(group.last_lines)
            raise RuntimeError(
                f"{name} must end well; it {group.state}: {group.reason}. "
                f"Its last lines:\n{lines}"
            )
        path = pathlib.Path(workdir, parameter_server_task.RESULT)
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {**found, "resident_bytes": memory}


def rate(name: str, options: programs.Options, *, setting: str) -> float:
    """Takes a turn and returns the median of its epochs' examples/s."""
    found = take(name, options, setting=setting)
    return statistics.median(found["rates"])


def _command(side: str, setting: str, options: programs.Options) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.parameter_server_task",
        f"--task={side}",
        f"--setting={setting}",
        f"--steps={options.steps}",
        f"--epochs={options.epochs}",
    ]


def _environ(*, own_threads: bool) -> dict[str, str]:
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    env = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if own_threads:
        env["TF_NUM_INTRAOP_THREADS"] = str(os.cpu_count() or 1)
    return env


def _watch(
    running: local_run.LocalRun, *, timeout_secs: float
) -> dict[str, int]:
    """Waits for the end and returns the tasks' memory as last seen."""
    deadline = time.monotonic() + timeout_secs
    seen: dict[str, int] = {}
    while not running.over:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"A turn must end within {timeout_secs:g} s; it has not."
            )
        for task, pid in running.pids.items():
            seen[task] = _resident_bytes(pid) or seen.get(task, 0)
        running.poll()
    running.poll(0)
    largest: dict[str, int] = {}
    for task, num_bytes in seen.items():
        kind = task.split("_")[2]
        largest[kind] = max(largest.get(kind, 0), num_bytes)
    return largest


def _resident_bytes(pid: int) -> int:
    """Returns what a process holds in memory; 0 where that is unknown."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return 0
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
