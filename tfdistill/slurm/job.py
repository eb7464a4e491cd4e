"""What each group of a run asks of Slurm, and does there: options and script.

The batch script hands a `Job`'s options to `tfdistill.slurm.group`, and that
hands a `Step`'s to `tfdistill.slurm.task`.
"""

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.cluster import identity
from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster

# Each group, and each start of a group, gets other ports: below the ports that
# Linux gives to outgoing connections, and above most services.
_PORTS = "15000-29999"
# Signal that Slurm sends before the time limit.
SIGNAL = "USR1"
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# Between the lines of one command.
_CONTINUED = " \\\n  "


def parse_ports(text: str) -> tuple[int, int]:
    """Parses `FIRST-LAST` into the first port and the one after the last."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if not match or not 1024 <= int(match[1]) < int(match[2]) <= 65535:
        raise identity.error(
            "--ports",
            "be FIRST-LAST with 1024 <= FIRST < LAST <= 65535",
            text,
            "Choose ports that the nodes' firewalls leave open.",
        )
    return int(match[1]), int(match[2]) + 1


def text_of(environ: Mapping[str, str], name: str) -> str:
    """Returns a variable that Slurm sets; ValueError if it is not set."""
    if not environ.get(name):
        raise identity.error(
            name,
            "be set",
            environ.get(name),
            "Slurm sets it in a task of srun, in a job of an array: run the "
            "script of tfdistill slurm by sbatch.",
        )
    return environ[name]


def number_of(environ: Mapping[str, str], name: str) -> int:
    """Returns a variable that Slurm sets, as a number."""
    return int(text_of(environ, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(local_cluster.StartedGroups):
    """One start of a group's tasks."""

    gpus_per_worker: int = fields.option(
        "GPUs of each worker; one is best",
        0,
        section="resources",
        least=0,
    )
    ports: str = fields.option(
        "<FIRST-LAST>: ports that tasks may use",
        _PORTS,
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        parse_ports(self.ports)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Step):
    """One group, from its first step to the end of its job."""

    cpus_per_worker: int = fields.option("CPUs of each task", 1, least=1)
    srun: Sequence[str] = fields.option(
        "<OPTION>: another option of srun, as in --srun=--exclusive", ()
    )
    python: str = fields.option(
        "<PROGRAM>: Python on the nodes, with tfdistill installed; default: "
        "this one; 'python' for the one that --setup provides",
        sys.executable,
    )
    max_restarts: int = fields.option(
        "how many times a failed group is restarted on its nodes; never after "
        "exit code 2 or 65",
        3,
        section="limits",
        least=0,
    )
    max_requeues: int = fields.option(
        "how many times a group is requeued after its time limit or a "
        "preemption",
        100,
        least=0,
    )
    # Tasks have half of it to end; they take up to four seconds.
    stop_secs: int = fields.option(
        "how long before the time limit the tasks are told to stop",
        120,
        least=10,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(Job):
    """What one batch script asks for, and runs.

    Attributes:
        command: What each task runs; the nodes look for it themselves.
    """

    command: Sequence[str]
    time: str | None = fields.option(
        "<TIME>: as sbatch's --time", None, section="job"
    )
    job_name: str = fields.option("<NAME>: as sbatch's --job-name", "tfdistill")
    sbatch: Sequence[str] = fields.option(
        "<OPTION>: another option of sbatch, as in --sbatch=--qos=low", ()
    )
    setup: str | None = fields.option(
        "<COMMANDS>: shell commands to run first, such as 'module load cuda'",
        None,
    )
    chdir: str | None = fields.option(
        "<DIR>: working directory of the tasks; default: this one", None
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.gpus_per_worker and self.ps_per_group:
            raise ValueError(
                "`gpus_per_worker` must be 0 if `ps_per_group` is not; "
                f"received {self.gpus_per_worker}. Slurm gives each task of a "
                "step the same resources, so each ps would hold GPUs too. "
                "Train without parameter servers on GPUs."
            )

    @property
    def text(self) -> str:
        """The whole script."""
        setup = (
            f"\n# As asked by --setup.\n{self.setup}\n" if self.setup else ""
        )
        directives = "\n".join(self._directives())
        command = [
            shlex.join([self.python, "-m", "tfdistill.slurm.group"]),
            shlex.quote(json.dumps(fields.chosen(Job, self), indent=2)),
            shlex.join(self.command),
        ]
        return (
            "#!/bin/bash\n"
            "# One element of this array is one group of the run: it has its "
            "own allocation,\n# fails and restarts on its own, and may start "
            "at another time than the others.\n#\n"
            "#   sbatch THIS_FILE               starts or resumes all groups\n"
            "#   sbatch --array=1 THIS_FILE     only group 1\n"
            f"{directives}\n{setup}\n"
            "# Starts the tasks by srun, again after a failure, and requeues "
            "the job near its\n# time limit. It takes this shell's place, and "
            "so gets the signals sent to it.\n"
            f"exec {_CONTINUED.join(command)}\n"
        )

    def _directives(self) -> list[str]:
        logs = str(self.logs_dir).replace("%", "%%")
        values: dict[str, object] = {
            "job-name": self.job_name,
            "array": f"0-{self.num_groups - 1}",
            "ntasks": self.num_tasks,
            "cpus-per-task": self.cpus_per_worker,
            "gpus-per-task": self.gpus_per_worker or None,
            "time": self.time,
            "chdir": self.chdir or os.getcwd(),
            "output": f"{logs}/slurm_group_%a.log",
            "open-mode": "append",
            # Only to this script, which signals the tasks.
            "signal": f"B:{SIGNAL}@{self.stop_secs}",
        }
        lines = [
            _directive(f"--{name}={value}")
            for name, value in values.items()
            if value is not None
        ]
        # After the loss of a node Slurm itself puts the job back.
        lines.append(_directive("--requeue"))
        return lines + [_directive(option) for option in self.sbatch]


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
