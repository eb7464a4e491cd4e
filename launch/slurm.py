"""Writes, and submits, the batch script that runs groups of tasks on Slurm.

python -m launch.slurm --num_groups=2 --workdir=DIR --recipe=digits > run.sh
python -m launch.slurm --num_groups=2 --workdir=DIR --submit -- python train.py
"""

import dataclasses
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from absl import logging

from launch import recipe_options
from tfdistill.exchange import signing
from tfdistill.launcher import command as launcher
from tfdistill.launcher import local_cluster
from tfdistill.slurm import commands
from tfdistill.slurm import group
from tfdistill.slurm import place
from tfdistill.system import programs

# What the script itself must decide.
_OWN = (
    "array",
    "gpus-per-task",
    "mem-per-cpu",
    "no-requeue",
    "ntasks",
    "open-mode",
    "output",
    "requeue",
    "signal",
)
# The same by one letter, which its value may follow at once.
_OWN_SHORT = {"a": "array", "n": "ntasks", "o": "output"}
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_MEMORY = re.compile(r"([1-9][0-9]*)([MGT])")
# Between the lines of one command.
_CONTINUED = " \\\n  "
_MEGABYTES = {"M": 1, "G": 1024, "T": 1024**2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """What one batch script asks for, and runs.

    Attributes:
        topology: Groups, tasks and files; its command is not looked at.
        command: What each task runs, as it is found on the nodes.
        python: The nodes' Python; it has tfdistill.
        chdir: Directory in which everything runs.
        job_name: Name of the job.
        cpus_per_worker: CPUs of each task.
        mem_per_worker: Memory of each task, such as `8G`; None for Slurm's
            default.
        gpus_per_worker: GPUs of each task.
        time, partition, account, constraint: Slurm's options of these names;
            None leaves them out.
        sbatch: Other options of sbatch, such as `--qos=low`.
        srun: Other options of srun.
        setup: Shell commands that prepare the environment on the first node.
        ports: Range of ports, `FIRST-LAST`.
        max_restarts: How often a group that has failed is started again in its
            allocation.
        max_requeues: How often a group goes back to the queue at its time
            limit.
        stop_secs: Seconds before the time limit at which its tasks are told
            to end.

    Raises:
        ValueError: A field is wrong.
    """

    topology: local_cluster.LocalCluster
    command: Sequence[str]
    python: str
    chdir: str
    job_name: str = "tfdistill"
    cpus_per_worker: int = 1
    mem_per_worker: str | None = None
    gpus_per_worker: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    sbatch: Sequence[str] = ()
    srun: Sequence[str] = ()
    setup: str | None = None
    ports: str = "15000-29999"
    max_restarts: int = 3
    max_requeues: int = 100
    stop_secs: int = 120

    def __post_init__(self) -> None:
        """Validates the fields."""
        for name, least in (
            ("cpus_per_worker", 1),
            ("gpus_per_worker", 0),
            ("max_restarts", 0),
            ("max_requeues", 0),
            # Tasks have half of it to end; they take up to four seconds.
            ("stop_secs", 10),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(
                    f"`{name}` must be >= {least}; received {value}."
                )
        if self.gpus_per_worker and self.topology.ps_per_group:
            raise ValueError(
                "`gpus_per_worker` must be 0 where `ps_per_group` is not; "
                f"received {self.gpus_per_worker}. Slurm gives each task of a "
                "step the same, so that each ps would hold GPUs too. Train "
                "without parameter servers on GPUs."
            )
        place.parse_ports(self.ports)
        self._check_options()

    def _check_options(self) -> None:
        for name in ("sbatch", "srun"):
            for option in getattr(self, name):
                if not option.startswith("-"):
                    raise ValueError(
                        f"`{name}` must be an option such as --{name}=--qos=low"
                        f"; received {option!r}."
                    )
                taken = option.lstrip("-").partition("=")[0]
                if not option.startswith("--"):
                    taken = _OWN_SHORT.get(option[1:2], "")
                if taken in _OWN:
                    raise ValueError(
                        f"`{name}` must leave --{taken} to the script; "
                        f"received {option!r}. Use the options of this program."
                    )

    @property
    def text(self) -> str:
        """The whole script."""
        setup = (
            f"\n# As asked by --setup.\n{self.setup}\n" if self.setup else ""
        )
        directives = "\n".join(self._directives())
        return (
            "#!/bin/bash\n"
            "# One element of this array is one group of the run: it has its "
            "own allocation,\n# fails and restarts alone, and may start at "
            "another time than the others.\n#\n"
            "#   sbatch THIS_FILE               starts all groups, or goes on "
            "with them\n"
            "#   sbatch --array=1 THIS_FILE     group 1 alone\n"
            f"{directives}\n{setup}\n"
            "# Starts the tasks by srun, again after a failure, and requeues "
            "the job near its\n# time limit. It takes this shell's place, and "
            "so gets the signals sent to it.\n"
            f"exec {_CONTINUED.join(self._group_command())}\n"
        )

    def _directives(self) -> list[str]:
        topology = self.topology
        last = topology.num_groups - 1
        logs = str(topology.logs_dir).replace("%", "%%")
        values: dict[str, object] = {
            "job-name": self.job_name,
            "array": f"0-{last}",
            "ntasks": topology.ports_per_group or 1,
            "cpus-per-task": self.cpus_per_worker,
            "mem-per-cpu": self._mem_per_cpu(),
            "gpus-per-task": self.gpus_per_worker or None,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "constraint": self.constraint,
            "chdir": self.chdir,
            "output": f"{logs}/slurm_group_%a.log",
            "open-mode": "append",
            # To this script alone, which tells the tasks.
            "signal": f"B:{group.SIGNAL}@{self.stop_secs}",
        }
        lines = [
            _directive(f"--{name}={value}")
            for name, value in values.items()
            if value is not None
        ]
        # After the loss of a node Slurm itself puts the job back.
        lines.append(_directive("--requeue"))
        return lines + [_directive(option) for option in self.sbatch]

    def _mem_per_cpu(self) -> str | None:
        if self.mem_per_worker is None:
            return None
        match = _MEMORY.fullmatch(self.mem_per_worker)
        if match is None:
            raise ValueError(
                "`mem_per_worker` must be a whole number and M, G or T, such "
                f"as 8G; received {self.mem_per_worker!r}."
            )
        megabytes = int(match[1]) * _MEGABYTES[match[2]]
        return f"{-(-megabytes // self.cpus_per_worker)}M"

    def _group_command(self) -> list[str]:
        """Returns the lines of the command that runs a group."""
        topology = self.topology
        exchange = topology.exchange
        options = [
            f"--workdir={topology.workdir}",
            *([f"--exchange={exchange}"] if exchange else []),
            f"--num_groups={topology.num_groups}",
            f"--workers_per_group={topology.workers_per_group}",
            f"--ps_per_group={topology.ps_per_group}",
            f"--cpus_per_worker={self.cpus_per_worker}",
            f"--gpus_per_worker={self.gpus_per_worker}",
            f"--ports={self.ports}",
            f"--max_restarts={self.max_restarts}",
            f"--max_requeues={self.max_requeues}",
            f"--stop_secs={self.stop_secs}",
            f"--python={self.python}",
            *(f"--srun={option}" for option in self.srun),
        ]
        return [
            shlex.join([self.python, "-m", "tfdistill.slurm.group"]),
            *map(shlex.quote, options),
            f"-- {shlex.join(self.command)}",
        ]


def _directive(option: str) -> str:
    """Returns a line for sbatch, which reads quotes as a shell does."""
    if _PLAIN.fullmatch(option):
        return f"#SBATCH {option}"
    if re.search(r"[\"'\\\x00-\x1f\x7f]", option):
        raise ValueError(
            "An option of sbatch must hold no quotes, backslashes or line "
            f"breaks; received {option!r}. Choose another name or path."
        )
    name, _, value = option.partition("=")
    return f'#SBATCH {name}="{value}"'


EXIT_FAILURE = 1
_SUBMITTED = "slurm.sh"
_NOTES = """\
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


def _add_options(options: programs.Flags) -> None:
    launcher.add_topology(options)
    recipe_options.add(options)
    _add_script(options)
    _add_resources(options)
    _add_limits(options)
    _add_nodes(options)


def _add_script(options: programs.Flags) -> None:
    options.section("script")
    options.add(
        flags.DEFINE_string,
        "output",
        None,
        "<FILE>: script to write; default stdout",
    )
    options.add(
        flags.DEFINE_boolean,
        "submit",
        False,
        "call sbatch too, and print the job's id; the script is then "
        f"DIR/{_SUBMITTED} by default",
    )


def _add_resources(options: programs.Flags) -> None:
    options.section("resources")
    add = options.add
    add(flags.DEFINE_integer, "cpus_per_worker", 1, "CPUs of each task")
    add(
        flags.DEFINE_string,
        "mem_per_worker",
        None,
        "<SIZE>: memory of each task, such as 8G",
    )
    add(
        flags.DEFINE_integer,
        "gpus_per_worker",
        0,
        "GPUs of each worker; one is best",
    )
    for name in ("time", "partition", "account", "constraint", "job_name"):
        text = f"as sbatch's --{name.replace('_', '-')}"
        add(flags.DEFINE_string, name, None, f"<{name.upper()}>: {text}")
    for name in ("sbatch", "srun"):
        add(
            flags.DEFINE_multi_string,
            name,
            [],
            f"<OPTION>: another option of {name}, as in --{name}=--exclusive",
        )


def _add_limits(options: programs.Flags) -> None:
    options.section("limits")
    for name, default, text in (
        (
            "max_restarts",
            3,
            "how often a group that has failed is started again on its nodes; "
            "not after exit code 2 or 65",
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
        options.add(flags.DEFINE_integer, name, default, text)


def _add_nodes(options: programs.Flags) -> None:
    options.section("nodes")
    add = options.add
    add(
        flags.DEFINE_string,
        "setup",
        None,
        "<COMMANDS>: shell commands to run first, such as 'module load cuda'",
    )
    add(
        flags.DEFINE_string,
        "python",
        sys.executable,
        "<PROGRAM>: the nodes' Python with tfdistill; default this one; "
        "python for the one that --setup provides",
    )
    add(
        flags.DEFINE_string,
        "chdir",
        os.getcwd(),
        "<DIR>: directory in which tasks run; default this one",
    )
    first, end = place.DEFAULT_PORTS
    add(
        flags.DEFINE_string,
        "ports",
        f"{first}-{end - 1}",
        "<FIRST-LAST>: ports that tasks may use",
    )


def _make_script(options: programs.Options) -> Script:
    command = recipe_options.command(
        options,
        python=options.python,
        workdir=os.path.abspath(options.workdir),
    )
    topology = local_cluster.LocalCluster(
        # The nodes look for the command, after --setup.
        command=[sys.executable],
        workdir=options.workdir,
        exchange=options.exchange,
        num_groups=options.num_groups,
        workers_per_group=options.workers_per_group,
        ps_per_group=options.ps_per_group,
    )
    names = {field.name for field in dataclasses.fields(Script)}
    given: dict[str, Any] = {
        name: value
        for name, value in vars(options).items()
        if name in names and value is not None
    }
    return Script(topology=topology, **given | {"command": command})


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
