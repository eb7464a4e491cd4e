"""One task of a Slurm job step: gives a command its identity, and waits for it.

srun ... python -m tfdistill.slurm.task JSON COMMAND [ARGUMENT ...]

The command gets TF_CONFIG and TFDISTILL_* as from tfdistill run, and its output
goes to the same log. This process stays, as a small parent: what srun returns
for a step whose other tasks were ended in consequence does not show which exit
code was the first.

TensorFlow's own `SlurmClusterResolver` knows of no groups, must be given the
number of GPUs of each node, and derives all ports from one number, so that two
groups on a node would meet. So this reads what Slurm says of each task itself.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.cluster import identity
from tfdistill.cluster import signs
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.slurm import job
from tfdistill.system import programs

# Slurm sends them to every process of a step, so that the command gets them
# too; this process only reports how the command ended.
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Signals that have arrived.
_told: list[int] = []


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
        """Reads what Slurm has set for this task, on one of the job's nodes."""
        text = job.text_of(environ, "SLURM_STEP_TASKS_PER_NODE")
        counts = [
            int(count)
            for count, num_nodes in _TASKS.findall(text)  # Such as 2(x3),1.
            for _ in range(int(num_nodes or 1))
        ]
        hosts = tuple(
            node
            for node, count in zip(nodes, counts, strict=False)
            for _ in range(count)
        )
        rank = job.number_of(environ, "SLURM_PROCID")
        node = job.text_of(environ, "SLURMD_NODENAME")
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
            group=job.number_of(environ, "SLURM_ARRAY_TASK_ID"),
            job_id=job.number_of(environ, "SLURM_JOB_ID"),
            step_id=job.number_of(environ, "SLURM_STEP_ID"),
        )

    def addresses(self, ports: tuple[int, int]) -> list[str]:
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


def find_task(step: job.Step, place: Place) -> local_cluster.Task:
    """Returns the task that is to run in a place."""
    if len(place.hosts) != step.num_tasks:
        raise ValueError(
            "The step must have one Slurm task for each of the group's "
            f"{step.num_tasks} tasks; received {len(place.hosts)}. Leave "
            "--ntasks to the script."
        )
    ports = job.parse_ports(step.ports)
    return step.tasks_at(place.group, place.addresses(ports))[place.rank]


def run(
    command: Sequence[str],
    task: local_cluster.Task,
    place: Place,
    env: Mapping[str, str],
) -> int:
    """Runs a task's command; returns its exit code, 128 + n for signal n."""
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
        code = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).wait()
    return 128 - code if code < 0 else code


def _leave_to_command(number: int, frame: types.FrameType | None) -> None:
    """Waits on: the command has had the signal, too."""
    _told.append(number)


def record_failure(path: pathlib.Path, **failure: object) -> bool:
    """Notes a failure if it is the first of its step; returns whether it is.

    `path` is a file of this step only. The note also says whether the task was
    stopped.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({**failure, "told": signal.SIGTERM in _told}, file)
    return True


def main(argv: Sequence[str]) -> int:
    """Runs one task of a step of a Slurm job.

    The first argument has, as JSON, the options of `job.Step`, the `nodes` of
    the job and the `failure_file`, made by the first task that fails; the
    others are the command. Returns its exit code; 2 for a wrong environment.
    """
    told, command = json.loads(argv[0]), argv[1:]
    failure_file = pathlib.Path(told["failure_file"])
    try:
        step = job.Step(**told["step"])
        place = Place.from_env(os.environ, nodes=told["nodes"])
        task = find_task(step, place)
        env = task.environ(os.environ)
    except ValueError as error:
        rank = f"rank {os.environ.get('SLURM_PROCID')}"
        code = programs.EXIT_OPTIONS
        record_failure(failure_file, task=rank, exit_code=code)
        print(error, file=sys.stderr)
        return code
    code = run(command, task, place, env)
    if code and record_failure(
        failure_file,
        task=task.name,
        exit_code=code,
        port_taken=signs.found(task.ready_path, signs.PORT_TAKEN),
    ):
        if not _told:
            print(f"{task.name} ended with {code}", file=sys.stderr)
            print("\n".join(files.quote(task.log_path)), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
