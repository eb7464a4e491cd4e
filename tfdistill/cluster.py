"""Which task of which group this process is, to and from the environment."""

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from tfdistill import tf_config

# Every TFDISTILL_ variable that some part of the library reads. A name outside
# this list is refused: it is most likely a typing error.
KNOWN_VARIABLES = frozenset(
    {
        "TFDISTILL_CHIEF_RETURN_SECS",
        "TFDISTILL_CHIEF_WAS_THERE",
        "TFDISTILL_DATA",
        "TFDISTILL_EXCHANGE",
        "TFDISTILL_EXCHANGE_KEY",
        "TFDISTILL_EXCHANGE_KEY_FILE",
        "TFDISTILL_GROUP",
        "TFDISTILL_NUM_GROUPS",
        "TFDISTILL_PROFILE_STEPS",
        "TFDISTILL_READY_FILE",
        "TFDISTILL_STALL_TIMEOUT_SECS",
        "TFDISTILL_START_TIMEOUT_SECS",
        "TFDISTILL_WORKDIR",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """One task's place in its group, and its group's place in the run.

    Attributes:
        task_type: `"chief"`, `"worker"` (default) or `"ps"`.
        task_index: Index among the tasks of that type. Default 0.
        spec: Addresses (`host:port`) of this group's tasks by type. Empty
            (default) means one task on its own, without `TF_CONFIG`.
        group: Index of this group. Default 0.
        num_groups: Number of groups in the run. Default 1.
        exchange: Directory or URL through which the groups see each other.
            Default: `exchange` below `workdir`, or None without a workdir.
        workdir: Directory or URL of the run, or None (default).

    Raises:
        ValueError: If the fields do not describe a cluster that can run.

    Example:
        >>> spec = {"worker": ["a:2222", "b:2222"]}
        >>> cluster = Cluster(task_index=1, spec=spec, group=1, num_groups=3)
        >>> cluster.task_name, cluster.num_workers, cluster.peers
        ('worker:1', 2, (0, 2))
    """

    task_type: str = "worker"
    task_index: int = 0
    spec: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    group: int = 0
    num_groups: int = 1
    exchange: str | None = None
    workdir: str | None = None

    def __post_init__(self) -> None:
        """Validates the fields and fills in the default exchange."""
        _check_groups(self.group, self.num_groups)
        for name in ("exchange", "workdir"):
            _check_path(name, getattr(self, name))
        spec = tf_config.checked_spec(self.spec)
        object.__setattr__(self, "spec", spec)
        tf_config.check_task(self.task_type, self.task_index, spec)
        if self.exchange is None and self.workdir is not None:
            object.__setattr__(
                self, "exchange", _join(self.workdir, "exchange")
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Reads `TF_CONFIG` and the `TFDISTILL_` variables.

        An empty variable counts as unset, and so does `TF_CONFIG={}`. With
        nothing set the result is one task in one group.

        Args:
            environ: Variables to read. Default `os.environ`.

        Returns:
            The cluster they describe.

        Raises:
            ValueError: Naming the field that is wrong and the remedy.
        """
        environ = os.environ if environ is None else environ
        _check_names(environ)
        task, spec = tf_config.parse(environ.get("TF_CONFIG", ""))
        return cls(
            task_type=task.get("type", "worker"),
            task_index=task.get("index", 0),
            spec=spec,
            group=_number(environ, "TFDISTILL_GROUP", 0),
            num_groups=_number(environ, "TFDISTILL_NUM_GROUPS", 1),
            exchange=environ.get("TFDISTILL_EXCHANGE") or None,
            workdir=environ.get("TFDISTILL_WORKDIR") or None,
        )

    def to_env(self) -> dict[str, str]:
        """Returns the variables that `from_env` turns into this cluster."""
        environ = {
            "TFDISTILL_GROUP": str(self.group),
            "TFDISTILL_NUM_GROUPS": str(self.num_groups),
        }
        if self.spec:
            task = {"type": self.task_type, "index": self.task_index}
            config = {"cluster": dict(self.spec), "task": task}
            environ["TF_CONFIG"] = json.dumps(config)
        if self.exchange is not None:
            environ["TFDISTILL_EXCHANGE"] = self.exchange
        if self.workdir is not None:
            environ["TFDISTILL_WORKDIR"] = self.workdir
        return environ

    @property
    def num_ps(self) -> int:
        """Number of parameter servers in this group."""
        return len(self.spec.get("ps", ()))

    @property
    def uses_parameter_servers(self) -> bool:
        """Whether this group trains under a parameter-server strategy."""
        return self.num_ps > 0

    @property
    def num_workers(self) -> int:
        """Tasks that compute gradients.

        The chief is one of them, unless there are parameter servers: then it
        only coordinates.
        """
        workers = len(self.spec.get("worker", ()))
        if not self.uses_parameter_servers:
            workers += len(self.spec.get("chief", ()))
        return workers or 1

    @property
    def is_chief(self) -> bool:
        """Whether this task writes on behalf of its group."""
        if self.task_type == "chief":
            return True
        first_worker = self.task_type == "worker" and self.task_index == 0
        return first_worker and "chief" not in self.spec

    @property
    def task_name(self) -> str:
        """Type and index, such as `"worker:1"`."""
        return f"{self.task_type}:{self.task_index}"

    @property
    def address(self) -> str | None:
        """This task's `host:port`; None for a task on its own."""
        if not self.spec:
            return None
        return self.spec[self.task_type][self.task_index]

    @property
    def peers(self) -> tuple[int, ...]:
        """Indices of all other groups, ascending."""
        return tuple(g for g in range(self.num_groups) if g != self.group)

    def ring_peers(self, num_neighbours: int = 1) -> tuple[int, ...]:
        """Returns the groups that precede this one round a ring of all groups.

        Args:
            num_neighbours: How many to return, the nearest first. Default 1.

        Returns:
            Group indices; empty in a run of one group.

        Raises:
            ValueError: If there are not that many other groups.
        """
        if self.num_groups == 1 and num_neighbours >= 1:
            return ()
        if not 1 <= num_neighbours < self.num_groups:
            raise ValueError(
                "`num_neighbours` must be between 1 and the number of other "
                f"groups, {self.num_groups - 1}; received {num_neighbours}. "
                "Ask for fewer neighbours or start more groups."
            )
        steps = range(1, num_neighbours + 1)
        return tuple((self.group - step) % self.num_groups for step in steps)

    @property
    def group_dir(self) -> str | None:
        """This group's own directory in the workdir; None without one."""
        if self.workdir is None:
            return None
        return _join(self.workdir, f"group_{self.group}")


def _join(base: str, name: str) -> str:
    # Not os.path: the base may be a URL.
    return f"{base}{name}" if base.endswith("/") else f"{base}/{name}"


def _check_names(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if not name.startswith("TFDISTILL_") or name in KNOWN_VARIABLES:
            continue
        near = difflib.get_close_matches(name, sorted(KNOWN_VARIABLES), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        # A mistyped name of the key must not put the key into a log.
        value = "a value" if "KEY" in name else repr(environ[name])
        raise ValueError(
            f"{name} is not a variable that tfdistill reads; received "
            f"{value}. {hint}Unset it or use one of: "
            f"{', '.join(sorted(KNOWN_VARIABLES))}."
        )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    return tf_config.parse_number(name, text) if text else default


def _check_groups(group: int, num_groups: int) -> None:
    if not tf_config.is_int(num_groups) or num_groups < 1:
        field = "`num_groups` (TFDISTILL_NUM_GROUPS)"
        remedy = "Use 1 for a run without other groups."
        raise tf_config.error(field, "be an integer >= 1", num_groups, remedy)
    if not tf_config.is_int(group) or not 0 <= group < num_groups:
        raise tf_config.error(
            "`group` (TFDISTILL_GROUP)",
            f"be an integer from 0 to num_groups - 1 = {num_groups - 1}",
            group,
            "Groups count from 0; set TFDISTILL_NUM_GROUPS to the number of "
            "groups in the run.",
        )


def _check_path(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value):
        return
    field = f"`{name}` (TFDISTILL_{name.upper()})"
    must = "be a directory or URL as a non-empty string, or None"
    raise tf_config.error(field, must, value, "Leave it out if there is none.")
