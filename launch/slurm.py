"""Writes, and submits, the batch script that runs groups of tasks on Slurm.

python -m launch.slurm --num_groups=2 --workdir=DIR --recipe=digits > run.sh
python -m launch.slurm --num_groups=2 --workdir=DIR --submit -- python train.py
"""

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from launch import recipe_options
from tfdistill.exchange import signing
from tfdistill.launcher import command as cli
from tfdistill.launcher import local_cluster
from tfdistill.slurm import commands
from tfdistill.slurm import place
from tfdistill.slurm import script as slurm_script

_PROG = "python -m launch.slurm"
EXIT_FAILURE = 1
_SUBMITTED = "slurm.sh"
_EPILOG = """\
DIR must be on storage that all nodes share. It is made at once, with its logs
and the key that signs the versions; everything else happens in the jobs. The
groups are the elements of a job array: each waits in the queue, runs, fails,
restarts and reaches its time limit alone. Submitted again, the same script goes
on from the groups' backups. docs/slurm.md tells more. Exit code: 0, 1 if sbatch
refuses, 2 for wrong options.

example:
  python -m launch.slurm --num_groups=2 --workers_per_group=4 --time=12:00:00 \\
      --cpus_per_worker=8 --workdir=/shared/run --submit --recipe=digits
"""


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=(
            f"{_PROG} --workdir=DIR [options] -- COMMAND [ARGUMENT ...]\n"
            f"       {_PROG} --workdir=DIR [options] --recipe=NAME"
        ),
        description="Writes the batch script of a run on Slurm.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser)
    _add_resources(parser)
    _add_limits(parser)
    _add_nodes(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    cli.add_topology(parser)
    recipe_options.add(parser)
    add("--output", metavar="FILE", help="script to write; default stdout")
    add(
        "--submit",
        action="store_true",
        help="call sbatch too, and print the job's id; the script is then "
        f"DIR/{_SUBMITTED} by default",
    )


def _add_resources(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cpus_per_worker",
        type=int,
        default=1,
        metavar="N",
        help="CPUs of each task; default 1",
    )
    add("--mem_per_worker", metavar="SIZE", help="of each task, such as 8G")
    add(
        "--gpus_per_worker",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of each worker; one is best; default 0",
    )
    for name in ("time", "partition", "account", "constraint", "job_name"):
        text = f"as sbatch's --{name.replace('_', '-')}"
        add(f"--{name}", metavar=name.upper(), help=text)
    for name in ("sbatch", "srun"):
        add(
            f"--{name}",
            action="append",
            default=[],
            metavar="OPTION",
            help=f"another option of {name}, as in --{name}=--exclusive; may "
            "be repeated",
        )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max_restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often a group that has failed is started again on its nodes; "
        "not after exit code 2 or 65; default 3",
    )
    add(
        "--max_requeues",
        type=int,
        default=100,
        metavar="N",
        help="how often a group goes back to the queue at its time limit or "
        "when it is preempted; default 100",
    )
    add(
        "--stop_secs",
        type=int,
        default=120,
        metavar="SECS",
        help="how long before the time limit the tasks are told to end; "
        "default 120",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--setup",
        metavar="COMMANDS",
        help="shell commands to run first, such as 'module load cuda'",
    )
    add(
        "--python",
        default=sys.executable,
        metavar="PROGRAM",
        help="the nodes' Python with tfdistill; default this one; python for "
        "the one that --setup provides",
    )
    add(
        "--chdir",
        default=os.getcwd(),
        metavar="DIR",
        help="directory in which tasks run; default this one",
    )
    first, end = place.DEFAULT_PORTS
    add(
        "--ports",
        default=f"{first}-{end - 1}",
        metavar="FIRST-LAST",
        help=f"ports that tasks may use; default {first}-{end - 1}",
    )


def _make_script(
    options: argparse.Namespace, command: Sequence[str]
) -> slurm_script.Script:
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
    return slurm_script.Script(topology=topology, command=command, **given)


def _prepare(topology: local_cluster.LocalCluster) -> None:
    """Makes what the jobs need before they start: Slurm writes into logs."""
    (topology.logs_dir / "ready").mkdir(parents=True, exist_ok=True)
    # Also where the environment has a key, which comes first in the tasks:
    # that of the submission counts, and may be another.
    signing.make_file(topology.key_path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    before, command = cli.split_command(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(before)
    path = options.output
    try:
        script = _make_script(
            options,
            recipe_options.command(
                options,
                command,
                python=options.python,
                workdir=os.path.abspath(options.workdir),
            ),
        )
        text = script.text
        _prepare(script.topology)
        if path is None and options.submit:
            path = str(pathlib.Path(script.topology.workdir, _SUBMITTED))
        if path is not None:
            pathlib.Path(path).write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if path is None:
        print(text, end="")
    if not options.submit:
        return 0
    try:
        print(commands.submit(path))
    except RuntimeError as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
