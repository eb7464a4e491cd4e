"""Writes, and submits, the batch script that runs groups of tasks on Slurm.

python -m launch.slurm --num_groups=2 --workdir=DIR --recipe=digits > run.sh
python -m launch.slurm --num_groups=2 --workdir=DIR --submit -- python train.py
"""

import dataclasses
import os
import pathlib
import sys
from typing import Any

from absl import logging

from launch import recipe_options
from tfdistill.exchange import signing
from tfdistill.launcher import command as launcher
from tfdistill.launcher import local_cluster
from tfdistill.slurm import commands
from tfdistill.slurm import place
from tfdistill.slurm import script as slurm_script
from tfdistill.system import programs

EXIT_FAILURE = 1
_SUBMITTED = "slurm.sh"
_NOTES = """\
DIR must be on storage that all nodes share. It is created at once, with its
logs and the key that signs the versions; everything else happens in the jobs.
The groups are the elements of a job array: each waits in the queue, runs,
fails, restarts and reaches its time limit separately. If you submit the same
script again, the groups resume from their backups. docs/slurm.md has the
details. Exit code: 0, 1 if sbatch refuses, 2 for wrong options.

example:
  python -m launch.slurm --num_groups=2 --workers_per_group=4 --time=12:00:00 \\
      --cpus_per_worker=8 --workdir=/shared/run --submit --recipe=digits
"""


def _add_options(options: programs.Flags) -> None:
    launcher.add_topology(options)
    recipe_options.add(options)
    _add_script(options)
    _add_resources(options)
    _add_limits(options)
    _add_nodes(options)
    launcher.add_start(options)


def _add_script(options: programs.Flags) -> None:
    options.section("script")
    options.add("output", "<FILE>: script to write; default stdout")
    options.add(
        "submit",
        "call sbatch too, and print the job's id; the script is then "
        f"DIR/{_SUBMITTED} by default",
        False,
    )


def _add_resources(options: programs.Flags) -> None:
    options.section("resources")
    add = options.add
    add("cpus_per_worker", "CPUs of each task", 1)
    add("mem_per_worker", "<SIZE>: memory of each task, such as 8G")
    add("gpus_per_worker", "GPUs of each worker; one is best", 0)
    for name in ("time", "partition", "account", "constraint", "job_name"):
        text = f"as sbatch's --{name.replace('_', '-')}"
        add(name, f"<{name.upper()}>: {text}")
    for name in ("sbatch", "srun"):
        add(
            name,
            f"<OPTION>: another option of {name}, as in --{name}=--exclusive",
            [],
        )


def _add_limits(options: programs.Flags) -> None:
    options.section("limits")
    for name, default, text in (
        (
            "max_restarts",
            3,
            "how often a failed group is restarted on its nodes; never after "
            "exit code 2 or 65",
        ),
        (
            "max_requeues",
            100,
            "how often a group goes back to the queue at its time limit or "
            "when it is preempted",
        ),
        (
            "stop_secs",
            120,
            "how long before the time limit the tasks are asked to end",
        ),
    ):
        options.add(name, text, default)


def _add_nodes(options: programs.Flags) -> None:
    options.section("nodes")
    add = options.add
    add(
        "setup",
        "<COMMANDS>: shell commands to run first, such as 'module load cuda'",
    )
    add(
        "python",
        "<PROGRAM>: the nodes' Python, which must have tfdistill; default "
        "this one; 'python' for the one that --setup provides",
        sys.executable,
    )
    add(
        "chdir",
        "<DIR>: directory in which tasks run; default this one",
        os.getcwd(),
    )
    first, end = place.DEFAULT_PORTS
    add("ports", "<FIRST-LAST>: ports that tasks may use", f"{first}-{end - 1}")


def _make_script(options: programs.Options) -> slurm_script.Script:
    command = recipe_options.command(
        options,
        python=options.python,
        workdir=os.path.abspath(options.workdir),
    )
    topology = local_cluster.LocalCluster(
        # The nodes look for the command, after --setup.
        command=[sys.executable],
        **local_cluster.Topology.chosen(options),
    )
    names = {field.name for field in dataclasses.fields(slurm_script.Script)}
    given: dict[str, Any] = {
        name: value
        for name, value in vars(options).items()
        if name in names and value is not None
    }
    return slurm_script.Script(
        topology=topology, **given | {"command": command}
    )


def _prepare(topology: local_cluster.LocalCluster) -> None:
    """Makes what the jobs need before they start: Slurm writes into logs."""
    (topology.logs_dir / "ready").mkdir(parents=True, exist_ok=True)
    # Also where the environment has a key, which comes first in the tasks:
    # that of the submission counts, and may be another.
    signing.make_file(topology.key_path)


def _run(options: programs.Options) -> int:
    path = options.output
    try:
        script = _make_script(options)
        text = script.text
        _prepare(script.topology)
        if path is None and options.submit:
            path = str(pathlib.Path(script.topology.workdir, _SUBMITTED))
        if path is not None:
            pathlib.Path(path).write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        raise programs.UsageError(str(error)) from error
    if path is None:
        print(text, end="")
    if not options.submit:
        return 0
    try:
        print(commands.submit(path))
    except RuntimeError as error:
        logging.error("%s", error)
        return EXIT_FAILURE
    return 0


PROGRAM = programs.Program(
    name="python -m launch.slurm",
    usage=launcher.EITHER,
    about="Writes the batch script of a run on Slurm.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    takes_command=True,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
