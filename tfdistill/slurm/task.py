"""One task of a Slurm job step: gives a command its identity, and waits for it.

srun ... python -m tfdistill.slurm.task --nodes=n1,n2 [options] -- COMMAND

The command gets TF_CONFIG and TFDISTILL_* as from launch.local, and its output
goes to the same log. This process stays, as a small parent: what srun returns
for a step whose other tasks were ended in consequence does not show which exit
code was the first.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.launcher import command as launcher
from tfdistill.launcher import fields
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import parent
from tfdistill.slurm import job
from tfdistill.slurm import node_parent
from tfdistill.slurm import place as slurm_place
from tfdistill.system import programs

# Slurm sends them to every process of a step, so that the command gets them
# too; this process only reports how the command ended.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Those that have come.
_told: list[int] = []


def find_task(
    step: job.Step,
    place: slurm_place.Place,
) -> local_cluster.Task:
    """Returns the task that is to run in a place."""
    if place.group >= step.num_groups:
        raise ValueError(
            "SLURM_ARRAY_TASK_ID must be the index of a group, less than "
            f"--num_groups={step.num_groups}; received {place.group}. "
            "Write a new script for another number of groups."
        )
    if len(place.hosts) != step.num_tasks:
        raise ValueError(
            f"The step must have a task of Slurm's for each of the group's "
            f"{step.num_tasks} tasks; received {len(place.hosts)}. Leave "
            "--ntasks to the script."
        )
    ports = slurm_place.parse_ports(step.ports)
    return step.tasks_at(place.group, place.addresses(ports))[place.rank]


def environment(
    task: local_cluster.Task,
    place: slurm_place.Place,
    environ: Mapping[str, str],
    *,
    num_gpus: int = 0,
) -> dict[str, str]:
    """Returns the complete environment of a task's command.

    With `num_gpus` = 0 CUDA_VISIBLE_DEVICES is left alone.
    """
    result = task.environ(environ)
    if num_gpus:
        result["CUDA_VISIBLE_DEVICES"] = slurm_place.visible_gpus(
            environ, local_rank=place.local_rank, num_gpus=num_gpus
        )
    return result


def run(
    command: Sequence[str],
    task: local_cluster.Task,
    place: slurm_place.Place,
    env: Mapping[str, str],
    *,
    shared: node_parent.NodeParent | None = None,
) -> int:
    """Runs a task's command, as a fork of a shared parent if there is one.

    Returns its exit code, or 128 + n after signal n.
    """
    task.ready_path.parent.mkdir(parents=True, exist_ok=True)
    files.forget_progress(task.ready_path)
    for number in _SIGNALS:
        # A handler, as the command would inherit that a signal is ignored.
        signal.signal(number, _leave_to_command)
    with task.log_path.open("ab", buffering=0) as log:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        step = f"job {place.job_id}, step {place.step_id}"
        node = place.hosts[place.rank]
        log.write(f"===== {now}: {step} on {node} =====\n".encode())
        code = None
        if shared is not None:
            code = shared.run(command, env=env, log_fd=log.fileno())
        if code is None and signal.SIGTERM in _told:
            return 128 + signal.SIGTERM
        if code is None:
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            code = process.wait()
    return 128 - code if code < 0 else code


def _leave_to_command(number: int, frame: Any) -> None:
    """Waits on: the command has had the signal, too."""
    _told.append(number)


def record_failure(path: pathlib.Path, name: str, exit_code: int) -> bool:
    """Notes a failure if it is the first of its step; returns whether it is.

    `path` is a file of this step only. The note also says whether the task was
    told to end.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        told = signal.SIGTERM in _told
        json.dump({"task": name, "exit_code": exit_code, "told": told}, file)
    return True


def _add_options(options: programs.Flags) -> None:
    fields.add(options, job.Step)
    options.section("step")
    for name, text in (
        ("nodes", "<NAME,...>: nodes of the job"),
        ("failure_file", "<FILE>: made by the first task that fails"),
    ):
        options.add(name, text, required=True)


def _run(options: programs.Options) -> int:
    """Returns the exit code of the command; 2 for a wrong environment."""
    failure_file = pathlib.Path(options.failure_file)
    environ = os.environ
    try:
        step = job.Step(**fields.chosen(job.Step, options))
        if not options.command:
            raise ValueError(launcher.NO_COMMAND)
        place = slurm_place.Place.from_env(
            environ, nodes=options.nodes.split(",")
        )
        task = find_task(step, place)
        env = environment(task, place, environ, num_gpus=step.gpus_per_worker)
    except ValueError as error:
        name = f"rank {environ.get('SLURM_PROCID')}"
        record_failure(failure_file, name, programs.EXIT_OPTIONS)
        raise programs.UsageError(str(error)) from error
    shared = None
    if (
        place.hosts.count(place.hosts[place.rank]) > 1
        and not step.gpus_per_worker
        and not parent.why_not(step.start, options.command, env)
    ):
        shared = node_parent.NodeParent(
            # The file's name is this step's only.
            name=f"tfdistill/{failure_file.name}/"
            f"{place.rank - place.local_rank}",
            starts=place.local_rank == 0,
            preload=step.modules,
            signals=_SIGNALS,
            told=_told,
        )
    code = run(options.command, task, place, env, shared=shared)
    if code and record_failure(failure_file, task.name, code) and not _told:
        print(f"{task.name} ended with {code}", file=sys.stderr)
        print("\n".join(files.quote(task.log_path)), file=sys.stderr)
    return code


PROGRAM = programs.Program(
    name="python -m tfdistill.slurm.task",
    usage="--workdir=DIR --nodes=NAME,... [options] -- COMMAND [ARGUMENT ...]",
    about="Runs one task of a step of a Slurm job.",
    define=_add_options,
    run=_run,
    takes_command=True,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
