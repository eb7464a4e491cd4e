"""What a run on this machine consists of: groups, tasks, ports and files.

Nothing is started here; see local_run.py. The number of threads of a task is
left alone: on 2 cores one thread for each of four tasks gained nothing.
"""

import dataclasses
import itertools
import os
import pathlib
import shutil
import socket
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.cluster import identity
from tfdistill.cluster import signs
from tfdistill.exchange import signing
from tfdistill.launcher import fields
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
_WORKER_RESTARTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Which groups there are and where they meet, whatever launches them.

    With parameter servers a group has a chief besides its workers, which
    coordinates.
    """

    workdir: str = fields.option(
        "<DIR>: directory of the run", section="groups"
    )
    num_groups: int = fields.option(
        "number of groups; each trains its own student", 1, least=1
    )
    workers_per_group: int = fields.option("workers in each group", 1, least=1)
    ps_per_group: int = fields.option(
        "parameter servers in each group; the group then also has a chief",
        0,
        least=0,
    )
    exchange: str | None = fields.option(
        "<URL>: directory or URL that the groups share; default: DIR/exchange",
        None,
    )

    def __post_init__(self) -> None:
        """Validates the numbers."""
        fields.check(self)

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
class StartedGroups(Topology):
    """Groups whose tasks this package starts itself; paths become absolute."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
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
    def ports_per_group(self) -> int:
        """Number of ports that a group needs: one task needs none."""
        return self.num_tasks if self.num_tasks > 1 else 0

    @property
    def logs_dir(self) -> pathlib.Path:
        """Directory of the tasks' logs."""
        return pathlib.Path(self.workdir, "logs")

    @property
    def key_path(self) -> pathlib.Path:
        """File of the key that the tasks sign with, unless they inherit one."""
        return pathlib.Path(self.workdir, run_files.KEY)

    def tasks_at(
        self,
        group: int,
        addresses: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
    ) -> tuple[Task, ...]:
        """Returns the tasks of one group: a chief, the workers, then the ps.

        `addresses` are `host:port` of each, on machines that share the workdir;
        `env` has variables to set for all of them.
        """
        free = iter(addresses)
        spec = {
            task_type: tuple(itertools.islice(free, size))
            for task_type, size in self.sizes.items()
            if self.ports_per_group
        }
        return tuple(
            self._task(
                identity.Cluster(
                    task_type=task_type,
                    task_index=index,
                    spec=spec,
                    group=group,
                    num_groups=self.num_groups,
                    exchange=self.exchange,
                    workdir=self.workdir,
                ),
                env or {},
            )
            for task_type, size in self.sizes.items()
            for index in range(size)
        )

    def _task(self, cluster: identity.Cluster, env: Mapping[str, str]) -> Task:
        kind = f"{cluster.task_type}_{cluster.task_index}"
        name = f"{run_files.group_name(cluster.group)}_{kind}"
        # Shorter than the log's name, as others read it: <group>_<type>_<i>.
        ready_path = self.logs_dir / "ready" / f"{cluster.group}_{kind}"
        return Task(
            cluster=cluster,
            env={
                **env,
                **cluster.to_env(),
                signing.FILE_VARIABLE: str(self.key_path),
                signs.VARIABLE: str(ready_path),
            },
            log_path=self.logs_dir / f"{name}.log",
            ready_path=ready_path,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCluster(StartedGroups):
    """A command to be run as groups of tasks on this machine.

    It has the options of `tfdistill run` and of `tfdistill.launch`.

    Attributes:
        command: Program and arguments, the same for each task.
        env: Variables to set for each task. Default none.
    """

    command: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: str = fields.option(
        "fork: if possible, Python tasks are forked from one parent process "
        "that has imported --preload; spawn: each task is a new program",
        parent.FORK,
        section="start",
        choices=parent.METHODS,
    )
    preload: str = fields.option(
        "<NAME,...>: modules that the parent imports; importing them must not "
        "start threads or run TensorFlow operations",
        ",".join(parent.PRELOAD),
    )
    on_group_failure: str = fields.option(
        "what the other groups do after one has failed for good",
        "stop",
        section="failures",
        choices=("stop", "continue"),
    )
    max_restarts: int = fields.option(
        "how many times a failed group is restarted before --on-group-failure "
        "applies; never after exit code 2 or 65",
        0,
        least=0,
    )
    # Once one worker has used them up the group continues with the workers
    # that are left, and none is started again. Without parameter servers a
    # worker cannot come back to its group.
    worker_restarts: int = fields.option(
        "with parameter servers: how many times each worker is restarted",
        _WORKER_RESTARTS,
        least=0,
    )
    start_timeout_secs: float = fields.option(
        "time limit for all tasks of a group to connect; 0 for scripts that "
        "do not call tfdistill.make_strategy",
        300.0,
        section="time limits",
        least=0,
    )
    grace_secs: float = fields.option(
        "time between SIGTERM and SIGKILL", 5.0, least=0
    )
    stuck_secs: float = fields.option(
        "kill a group that completes no step for this long, or for ten times "
        "its longest recent step if that is longer; 0 for never, as in a "
        "debugger",
        8.0,
        least=0,
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        is_default = self.worker_restarts in (0, _WORKER_RESTARTS)
        if not self.ps_per_group and not is_default:
            raise ValueError(
                "`worker_restarts` must be left out if `ps_per_group` is 0; "
                f"received {self.worker_restarts}. Without parameter servers, "
                "a group ends when its first worker fails."
            )
        is_env = isinstance(self.env, Mapping) and all(
            isinstance(name, str) and isinstance(value, str | int | float)
            for name, value in self.env.items()
        )
        if not is_env:
            raise ValueError(
                "`env` must be a dict of variables, each with a string or a "
                f"number; received {self.env!r}."
            )
        variables = {name: str(value) for name, value in self.env.items()}
        object.__setattr__(self, "env", variables)
        taken = sorted((IDENTITY_VARIABLES | signing.VARIABLES) & set(self.env))
        if taken:
            raise ValueError(
                "`env` must not set variables that the launcher sets for each "
                f"task; received {', '.join(taken)}. Use the launcher's "
                "options. Set the exchange's key in the launcher's own "
                "environment."
            )
        # A str would be a list of letters.
        is_list = isinstance(self.command, list | tuple) and all(
            isinstance(word, str | os.PathLike) for word in self.command
        )
        command = tuple(self.command) if is_list else ()
        if not command or shutil.which(command[0]) is None:
            raise ValueError(
                "`command` must be a list of a program (on PATH, or its path) "
                f"and its arguments; received {self.command!r}. Run a script "
                "with: python SCRIPT"
            )
        object.__setattr__(self, "command", tuple(map(os.fspath, command)))

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in `preload`."""
        return tuple(name for name in self.preload.split(",") if name)

    def group_tasks(self, group: int, ports: Sequence[int]) -> tuple[Task, ...]:
        """Returns the tasks of one group, at ports of this machine."""
        addresses = [f"{HOST}:{port}" for port in ports]
        return self.tasks_at(group, addresses, env=self.env)


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
