"""What one group asks of Slurm and does there: options of its programs.

The batch script runs `tfdistill.slurm.group` with a `Job`'s options, and that
runs `tfdistill.slurm.task` with a `Step`'s.
"""

import dataclasses
import sys
from collections.abc import Sequence

from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster
from tfdistill.slurm import place


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
        f"{place.DEFAULT_PORTS[0]}-{place.DEFAULT_PORTS[1] - 1}",
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        place.parse_ports(self.ports)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Step):
    """One group, from its first step to the end of its job."""

    cpus_per_worker: int = fields.option("CPUs of each task", 1, least=1)
    srun: Sequence[str] = fields.option(
        "<OPTION>: another option of srun, as in --srun=--exclusive", ()
    )
    python: str = fields.option(
        "<PROGRAM>: the nodes' Python, which must have tfdistill; default "
        "this one; 'python' for the one that --setup provides",
        sys.executable,
    )
    max_restarts: int = fields.option(
        "how often a failed group is restarted on its nodes; never after exit "
        "code 2 or 65",
        3,
        section="limits",
        least=0,
    )
    max_requeues: int = fields.option(
        "how often a group goes back to the queue at its time limit or when "
        "it is preempted",
        100,
        least=0,
    )
    # Tasks have half of it to end; they take up to four seconds.
    stop_secs: int = fields.option(
        "how long before the time limit the tasks are asked to end",
        120,
        least=10,
    )
