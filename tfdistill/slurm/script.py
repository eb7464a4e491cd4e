"""The batch script of a run: what each job asks Slurm for, and what it runs."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence

from tfdistill.launcher import fields
from tfdistill.slurm import group
from tfdistill.slurm import job

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
class Script(job.Job):
    """What one batch script asks for, and runs.

    Attributes:
        command: What each task runs; the nodes look for it themselves.
    """

    command: Sequence[str]
    mem_per_worker: str | None = fields.option(
        "<SIZE>: memory of each task, such as 8G", None, section="job"
    )
    time: str | None = fields.option("<TIME>: as sbatch's --time", None)
    partition: str | None = fields.option("<NAME>: as sbatch's", None)
    account: str | None = fields.option("<NAME>: as sbatch's", None)
    constraint: str | None = fields.option("<FEATURES>: as sbatch's", None)
    job_name: str = fields.option("<NAME>: as sbatch's --job-name", "tfdistill")
    sbatch: Sequence[str] = fields.option(
        "<OPTION>: another option of sbatch, as in --sbatch=--qos=low", ()
    )
    setup: str | None = fields.option(
        "<COMMANDS>: shell commands to run first, such as 'module load cuda'",
        None,
    )
    chdir: str | None = fields.option(
        "<DIR>: directory in which tasks run; default this one", None
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.gpus_per_worker and self.ps_per_group:
            raise ValueError(
                "`gpus_per_worker` must be 0 if `ps_per_group` is not; "
                f"received {self.gpus_per_worker}. Slurm gives each task of a "
                "step the same, so that each ps would hold GPUs too. Train "
                "without parameter servers on GPUs."
            )
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
            "own allocation,\n# fails and restarts on its own, and may start "
            "at another time than the others.\n#\n"
            "#   sbatch THIS_FILE               starts or resumes all groups\n"
            "#   sbatch --array=1 THIS_FILE     only group 1\n"
            f"{directives}\n{setup}\n"
            "# Starts the tasks by srun, again after a failure, and requeues "
            "the job near its\n# time limit. It takes this shell's place, and "
            "so gets the signals sent to it.\n"
            f"exec {_CONTINUED.join(self._group_command())}\n"
        )

    def _directives(self) -> list[str]:
        logs = str(self.logs_dir).replace("%", "%%")
        values: dict[str, object] = {
            "job-name": self.job_name,
            "array": f"0-{self.num_groups - 1}",
            "ntasks": self.num_tasks,
            "cpus-per-task": self.cpus_per_worker,
            "mem-per-cpu": self._mem_per_cpu(),
            "gpus-per-task": self.gpus_per_worker or None,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "constraint": self.constraint,
            "chdir": self.chdir or os.getcwd(),
            "output": f"{logs}/slurm_group_%a.log",
            "open-mode": "append",
            # Only to this script, which signals the tasks.
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
        return [
            shlex.join([self.python, "-m", "tfdistill.slurm.group"]),
            *map(shlex.quote, fields.arguments(job.Job, self)),
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
