"""Where Slurm has put the tasks of a job step: nodes, ranks and ports.

TensorFlow's own `SlurmClusterResolver` knows of no groups, must be given the
number of GPUs of each node, and derives all ports from one number, so that two
groups on a node would meet. So this reads what Slurm says of each task itself.
"""

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.cluster import identity

# One group after the other, and one start of a group after the other, get
# ports of their own: below those that Linux gives to outgoing connections, and
# above most services.
DEFAULT_PORTS = (15000, 30000)
# Another start of a group is put so many groups' ports further on.
_STRIDE = 101
_TASKS = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """One task's place in the step that runs its group.

    `hosts` are the nodes of all tasks by rank; the group is the index of the
    job in its array, and `step_id` counts the starts of the group in this job.
    """

    rank: int
    hosts: tuple[str, ...]
    group: int
    job_id: int
    step_id: int

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str], *, nodes: Sequence[str]
    ) -> "Place":
        """Reads what Slurm has set for this task.

        Example:
            >>> Place.from_env(
            ...     {
            ...         "SLURM_ARRAY_TASK_ID": "1",
            ...         "SLURM_JOB_ID": "40",
            ...         "SLURM_PROCID": "2",
            ...         "SLURM_STEP_ID": "0",
            ...         "SLURM_STEP_TASKS_PER_NODE": "2,1",
            ...         "SLURMD_NODENAME": "n2",
            ...     },
            ...     nodes=["n1", "n2"],
            ... ).hosts
            ('n1', 'n1', 'n2')
        """
        counts = _tasks_per_node(text_of(environ, "SLURM_STEP_TASKS_PER_NODE"))
        hosts = tuple(
            node
            for node, count in zip(nodes, counts, strict=False)
            for _ in range(count)
        )
        rank = number_of(environ, "SLURM_PROCID")
        node = text_of(environ, "SLURMD_NODENAME")
        if hosts[rank : rank + 1] != (node,):
            raise identity.error(
                f"The node of task {rank}",
                f"be {node}, as SLURMD_NODENAME says",
                dict(enumerate(hosts)).get(rank),
                "Tasks must follow each other node by node, on all nodes of "
                "the job: leave --distribution=block to the script, and ask "
                "for at most as many nodes as a group has tasks.",
            )
        return cls(
            rank=rank,
            hosts=hosts,
            group=number_of(environ, "SLURM_ARRAY_TASK_ID"),
            job_id=number_of(environ, "SLURM_JOB_ID"),
            step_id=number_of(environ, "SLURM_STEP_ID"),
        )

    def addresses(self, ports: tuple[int, int] = DEFAULT_PORTS) -> list[str]:
        """Returns `host:port` of each task, the same for all of them."""
        first, end = ports
        num_tasks = len(self.hosts)
        num_places = (end - first) // num_tasks
        if num_places < 1:
            raise identity.error(
                "--ports",
                f"name at least {num_tasks} ports, one for each task",
                f"{first}-{end}",
                "Give it a wider range.",
            )
        first += (self.job_id + _STRIDE * self.step_id) % num_places * num_tasks
        return [f"{host}:{first + i}" for i, host in enumerate(self.hosts)]


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


def _tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's form of it, such as `2(x3),1`."""
    counts = []
    for number, times in _TASKS.findall(text):
        counts += [int(number)] * int(times or 1)
    return counts


def text_of(environ: Mapping[str, str], name: str) -> str:
    """Returns a variable that Slurm sets; ValueError if it is not set."""
    if not environ.get(name):
        raise identity.error(
            name,
            "be set",
            environ.get(name),
            "Slurm sets it in a task of srun, in a job of an array: run the "
            "script of launch.slurm by sbatch.",
        )
    return environ[name]


def number_of(environ: Mapping[str, str], name: str) -> int:
    """Returns a variable that Slurm sets, as a number."""
    return int(text_of(environ, name))
