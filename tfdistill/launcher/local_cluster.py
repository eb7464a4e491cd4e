"""What a run on this machine consists of: groups, tasks, ports and files.

Nothing is started here; see local_run.py.

The number of threads of a task is left alone. On 2 cores, four single-task
groups training a small convolution net took between 0 and 9% fewer seconds a
step with `TF_NUM_INTRAOP_THREADS=1` and `OMP_NUM_THREADS=1`, which is within
the noise; on a machine with many cores and many tasks set them yourself.
"""

import dataclasses
import os
import pathlib
import shutil
import socket
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.cluster import identity
from tfdistill.cluster import signs
from tfdistill.exchange import signing
from tfdistill.launcher import parent
from tfdistill.launcher import trackers
from tfdistill.system import run_files

# Variables that only the launcher sets.
IDENTITY_VARIABLES = frozenset(
    {
        "TF_CONFIG",
        "TFDISTILL_EXCHANGE",
        "TFDISTILL_GROUP",
        "TFDISTILL_NUM_GROUPS",
        "TFDISTILL_READY_FILE",
        "TFDISTILL_WORKDIR",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A process to be: its identity, its variables and where its files go."""

    cluster: identity.Cluster
    env: Mapping[str, str]
    log_path: pathlib.Path
    ready_path: pathlib.Path

    @property
    def name(self) -> str:
        """A name unique in the run, such as `group_0_worker_1`."""
        return self.log_path.stem

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the process; ValueError if it is wrong."""
        result = {
            name: value
            for name, value in inherited.items()
            if name not in IDENTITY_VARIABLES
        }
        result.setdefault("PYTHONUNBUFFERED", "1")  # Logs are read live.
        if self.cluster.uses_parameter_servers:
            # As TensorFlow's guide to parameter servers asks of each server.
            result.setdefault("GRPC_FAIL_FAST", "use_caller")
        result = {**trackers.defaults(self.cluster), **result}
        result.update(trackers.silence(is_chief=self.cluster.is_chief))
        result.update(self.env)
        if signing.has_key(inherited):  # The user's key, not one of our own.
            result.pop(signing.FILE_VARIABLE, None)
            result.update(
                {k: v for k, v in inherited.items() if k in signing.VARIABLES}
            )
        identity.Cluster.from_env(result)
        return result


HOST = "127.0.0.1"
_FAILURE_RULES = ("stop", "continue")
_WORKER_RESTARTS = 10


def check_at_least(fields: object, **limits: float) -> None:
    """Checks that fields of an object are None or large enough numbers."""
    for name, least in limits.items():
        value = getattr(fields, name)
        if value is not None and not value >= least:
            raise ValueError(f"`{name}` must be >= {least}; received {value}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Which groups there are and where they meet, whatever launches them.

    Every launcher has an option for each of these fields.

    Attributes:
        workdir: Directory for logs and results.
        num_groups: Number of groups. Default 1.
        workers_per_group: Workers in each. Default 1.
        ps_per_group: Parameter servers in each. Default 0; if there are any,
            each group has a chief besides its workers, which coordinates.
        exchange: Directory or URL that the groups share. Default: `exchange`
            in the workdir.
    """

    workdir: str
    num_groups: int = 1
    workers_per_group: int = 1
    ps_per_group: int = 0
    exchange: str | None = None

    def __post_init__(self) -> None:
        """Validates the numbers."""
        check_at_least(self, num_groups=1, workers_per_group=1, ps_per_group=0)

    @staticmethod
    def chosen(options: object) -> dict[str, Any]:
        """Returns the fields as a launcher's parsed options have them."""
        names = [field.name for field in dataclasses.fields(Topology)]
        return {name: getattr(options, name) for name in names}

    def arguments(self) -> list[str]:
        """Returns the fields as arguments for a program with such options."""
        return [
            f"--{name}={value}"
            for name, value in self.chosen(self).items()
            if value is not None
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of tasks of each type in a group."""
        sizes = {"worker": self.workers_per_group}
        if self.ps_per_group:
            sizes = {"chief": 1, **sizes, "ps": self.ps_per_group}
        return sizes

    @property
    def num_tasks(self) -> int:
        """Number of tasks in a group."""
        return sum(self.sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCluster(Topology):
    """A command to be run as groups of tasks on this machine.

    Attributes:
        command: Program and arguments, the same for each task.
        env: Variables to set for each task. Default none.
        on_group_failure: `"stop"` (default) ends the other groups when one
            has failed, `"continue"` lets them finish.
        start_timeout_secs: See `watches.StartLimit`. Default 300; 0 is none.
        grace_secs: Time between SIGTERM and SIGKILL. Default 5.
        worker_restarts: How often each worker of a group with parameter
            servers is started again after its end, whatever the reason. Once
            one has used them up the group continues with the workers that are
            left, and none is started again. Default None: 10, or 0 without
            parameter servers, when a worker cannot come back to its group.
        max_restarts: How often each group is started again as a whole after
            it has failed. Default 0.
        frozen_secs: A task that has been stopped by a signal for so long is
            killed. Default 3; 0 for none, as for debugging.
        stuck_secs: A group whose steps stop coming is given up after so many
            seconds, or later if its steps are slow: see
            `watches.ProgressLimit`. Default 8; 0 for never.
        start: `"fork"` (default): tasks that run a Python command are forks of
            one parent, where that can be; `"spawn"`: new programs.
        preload: Modules that the parent imports. They must neither start a
            thread nor run an operation of TensorFlow. Default: tensorflow,
            keras and tfdistill.
    """

    command: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    on_group_failure: str = "stop"
    start_timeout_secs: float = 300.0
    grace_secs: float = 5.0
    worker_restarts: int | None = None
    max_restarts: int = 0
    frozen_secs: float = 3.0
    stuck_secs: float = 8.0
    start: str = parent.FORK
    preload: Sequence[str] = parent.PRELOAD

    def __post_init__(self) -> None:
        """Validates the fields and makes local paths absolute."""
        super().__post_init__()
        check_at_least(
            self,
            start_timeout_secs=0,
            grace_secs=0,
            worker_restarts=0,
            max_restarts=0,
            frozen_secs=0,
            stuck_secs=0,
        )
        if self.worker_restarts and not self.ps_per_group:
            raise ValueError(
                "`worker_restarts` must be left out if `ps_per_group` is "
                f"0; received {self.worker_restarts}. Without parameter "
                "servers a group ends with its first worker."
            )
        if self.on_group_failure not in _FAILURE_RULES:
            raise ValueError(
                f"`on_group_failure` must be one of {_FAILURE_RULES}; received "
                f"{self.on_group_failure!r}."
            )
        if self.start not in parent.METHODS:
            raise ValueError(
                f"`start` must be one of {parent.METHODS}; received "
                f"{self.start!r}."
            )
        object.__setattr__(self, "preload", tuple(self.preload))
        taken = sorted((IDENTITY_VARIABLES | signing.VARIABLES) & set(self.env))
        if taken:
            raise ValueError(
                "`env` must not set what the launcher sets for each task; "
                f"received {', '.join(taken)}. Use the launcher's options. Set "
                "the exchange's key in the launcher's own environment."
            )
        self._check_command()
        self._set_paths()

    def _check_command(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(
                "`command` must be a list of a program and its arguments; "
                f"received {self.command!r}."
            )
        if shutil.which(self.command[0]) is None:
            raise ValueError(
                "`command` must begin with a program on PATH or the path of "
                f"an executable file; received {self.command[0]!r}. "
                "A script is run by: python SCRIPT"
            )
        object.__setattr__(self, "command", tuple(self.command))

    def _set_paths(self) -> None:
        if not self.workdir or "://" in self.workdir:
            raise ValueError(
                "`workdir` must be a local directory, as logs are written "
                f"there; received {self.workdir!r}. A URL may be given as "
                "`exchange`."
            )
        object.__setattr__(self, "workdir", os.path.abspath(self.workdir))
        if self.exchange and "://" not in self.exchange:
            path = os.path.abspath(self.exchange)
            object.__setattr__(self, "exchange", path)

    @property
    def logs_dir(self) -> pathlib.Path:
        """Directory of the tasks' logs."""
        return pathlib.Path(self.workdir, "logs")

    @property
    def key_path(self) -> pathlib.Path:
        """File of the key that the tasks sign with, unless they inherit one."""
        return pathlib.Path(self.workdir, run_files.KEY)

    @property
    def num_ports(self) -> int:
        """Number of ports that `tasks` needs."""
        return self.num_groups * self.ports_per_group

    @property
    def ports_per_group(self) -> int:
        """Number of ports that `group_tasks` needs: one task needs none."""
        return self.num_tasks if self.num_tasks > 1 else 0

    @property
    def num_worker_restarts(self) -> int:
        """How often each worker may be started again."""
        if self.worker_restarts is None:
            return _WORKER_RESTARTS if self.ps_per_group else 0
        return self.worker_restarts

    def tasks(self, ports: Sequence[int]) -> tuple[tuple[Task, ...], ...]:
        """Returns the tasks of each group, at `num_ports` ports."""
        size = self.ports_per_group
        return tuple(
            self.group_tasks(group, ports[group * size : (group + 1) * size])
            for group in range(self.num_groups)
        )

    def group_tasks(self, group: int, ports: Sequence[int]) -> tuple[Task, ...]:
        """Returns the tasks of one group, at ports of this machine."""
        return self.tasks_at(group, [f"{HOST}:{port}" for port in ports])

    def tasks_at(
        self, group: int, addresses: Sequence[str]
    ) -> tuple[Task, ...]:
        """Returns the tasks of one group: a chief, the workers, then the ps.

        `addresses` are `host:port` of each, on machines that share the workdir.
        """
        free = iter(addresses)
        spec = {
            task_type: tuple(next(free) for _ in range(size))
            for task_type, size in self.sizes.items()
            if self.ports_per_group
        }
        names = [(t, i) for t, hosts in spec.items() for i in range(len(hosts))]
        clusters = [
            identity.Cluster(
                task_type=task_type,
                task_index=index,
                spec=spec,
                group=group,
                num_groups=self.num_groups,
                exchange=self.exchange,
                workdir=self.workdir,
            )
            for task_type, index in names or [("worker", 0)]
        ]
        return tuple(self._task(cluster) for cluster in clusters)

    def _task(self, cluster: identity.Cluster) -> Task:
        kind = f"{cluster.task_type}_{cluster.task_index}"
        name = f"{run_files.group_name(cluster.group)}_{kind}"
        # Shorter than the log's name, as others read it: <group>_<type>_<i>.
        ready_path = self.logs_dir / "ready" / f"{cluster.group}_{kind}"
        env = {
            **self.env,
            **cluster.to_env(),
            signing.FILE_VARIABLE: str(self.key_path),
            signs.VARIABLE: str(ready_path),
        }
        return Task(
            cluster=cluster,
            env=env,
            log_path=self.logs_dir / f"{name}.log",
            ready_path=ready_path,
        )


def reserve_ports(num_ports: int) -> list[socket.socket]:
    """Binds sockets to free ports chosen by the kernel.

    While the caller keeps the sockets, to close them at the end of the run, no
    process that asks the kernel for any port gets these. As they are bound with
    SO_REUSEADDR and do not listen, TensorFlow's server, which names the port,
    can still listen on it.
    """
    sockets = []
    for _ in range(num_ports):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        sockets.append(holder)
    return sockets
