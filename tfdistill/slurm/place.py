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
    local_rank: int
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
            ...         "SLURM_LOCALID": "0",
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
        if len(counts) != len(nodes):
            raise identity.error(
                "SLURM_STEP_TASKS_PER_NODE",
                f"name the tasks on each of {len(nodes)} nodes",
                environ["SLURM_STEP_TASKS_PER_NODE"],
                "The group must run on all nodes of its job: ask for fewer "
                "nodes, or for as many as it has tasks.",
            )
        hosts = tuple(
            node
            for node, count in zip(nodes, counts, strict=True)
            for _ in range(count)
        )
        rank = number_of(environ, "SLURM_PROCID")
        node = text_of(environ, "SLURMD_NODENAME")
        if hosts[rank : rank + 1] != (node,):
            raise identity.error(
                f"The node of task {rank}",
                f"be {node}, as SLURMD_NODENAME says",
                dict(enumerate(hosts)).get(rank),
                "Tasks must follow each other node by node: leave "
                "--distribution=block to the script.",
            )
        return cls(
            rank=rank,
            local_rank=number_of(environ, "SLURM_LOCALID"),
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


def visible_gpus(
    environ: Mapping[str, str], *, local_rank: int, num_gpus: int
) -> str:
    """Returns the CUDA_VISIBLE_DEVICES of one task.

    Slurm shows a task its own GPUs, or all those of the job on the node,
    depending on its configuration.

    Example:
        >>> shown = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
        >>> visible_gpus(shown, local_rank=1, num_gpus=2)
        '6,7'
    """
    text = environ.get("CUDA_VISIBLE_DEVICES", "")
    found = [name for name in text.split(",") if name]
    if len(found) == num_gpus:
        return text
    own = found[local_rank * num_gpus : (local_rank + 1) * num_gpus]
    if len(own) < num_gpus:
        raise identity.error(
            "CUDA_VISIBLE_DEVICES",
            f"name {num_gpus} GPUs for each task of the node, so for task "
            f"{local_rank} too",
            text,
            "Slurm's --gpus-per-task sets it if its configuration has GPUs "
            "(GresTypes=gpu).",
        )
    return ",".join(own)


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
    counts = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise identity.error(
                "SLURM_STEP_TASKS_PER_NODE",
                "have the form 2(x3),1",
                text,
                "Slurm sets it; is this a task of srun?",
            )
        counts += [int(match[1])] * int(match[2] or 1)
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
    text = text_of(environ, name)
    # In a federation of clusters the number of a job has ten digits.
    if not re.fullmatch("[0-9]{1,10}", text):
        must = "be a whole number"
        raise identity.error(name, must, text, "Slurm sets it.")
    return int(text)
