"""Which task of which group this process is, to and from the environment."""

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from tfdistill.system import run_files

TASK_TYPES = ("chief", "worker", "ps")
# Keys that hosted services add and that say nothing about the cluster.
_IGNORABLE = {
    "TF_CONFIG": {"environment", "job", "rpc_layer"},
    "TF_CONFIG.task": {"cloud", "trial"},
}
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_EVALUATOR = (
    "TensorFlow waits for an evaluator forever. Remove it, and run the "
    "evaluation as a program of its own without TF_CONFIG."
)
_SPARSE = (
    "A sparse cluster names only some: set enableDynamicWorker of the TFJob to "
    "false."
)
_SHAPE = (
    'Set it to {"cluster": {"worker": ["host:port", ...]}, '
    '"task": {"type": "worker", "index": 0}}, or unset it to run one task.'
)


def error(field: str, must: str, received: Any, remedy: str) -> ValueError:
    """Returns the one form that all errors about the environment take."""
    text = repr(received)
    text = text if len(text) <= 200 else text[:200] + "..."
    return ValueError(f"{field} must {must}; received {text}. {remedy}")


def is_int(value: Any) -> bool:
    """Whether the value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_number(field: str, text: str) -> int:
    """Parses a whole number >= 0 written in plain decimal digits."""
    if not _NUMBER.fullmatch(text):
        must = "be a whole number >= 0 in plain decimal digits"
        raise error(field, must, text, "Write it as, say, 0 or 12.")
    return int(text)


def parse(text: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Splits the JSON text of TF_CONFIG into its task and its cluster.

    Both are empty if it is unset, that is empty or `{}`. Of the cluster only
    the outer shape has been checked.
    """
    config = _load(text)
    if config == {}:
        return {}, {}
    if not isinstance(config, dict):
        raise error("TF_CONFIG", "be a JSON object", config, _SHAPE)
    if "sparseCluster" in config:
        must = "name all tasks of the group"
        raise error("TF_CONFIG", must, config, _SPARSE)
    _check_keys("TF_CONFIG", config, ("cluster", "task"))
    for key in ("cluster", "task"):
        if not isinstance(config.get(key), dict) or not config[key]:
            must = "be present and be a JSON object that is not empty"
            raise error(f"TF_CONFIG.{key}", must, config.get(key), _SHAPE)
    task = config["task"]
    _check_keys("TF_CONFIG.task", task, ("type", "index"))
    for key in ("type", "index"):
        if key not in task:
            raise error(f"TF_CONFIG.task.{key}", "be present", task, _SHAPE)
    index = task["index"]
    # TensorFlow accepts an index in quotes.
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    kind, cluster = _read_master(task["type"], config["cluster"])
    return {"type": kind, "index": index}, cluster


def _read_master(kind: Any, cluster: dict[str, Any]) -> tuple[Any, Any]:
    """Reads `master`, as SageMaker and older services call it, as `chief`."""
    if "master" not in cluster:
        return kind, cluster
    if "chief" in cluster:
        must = "name a chief or a master, which is the same task"
        remedy = "Remove one of them."
        raise error("TF_CONFIG.cluster", must, sorted(cluster), remedy)
    kind = "chief" if kind == "master" else kind
    return kind, {
        "chief" if name == "master" else name: hosts
        for name, hosts in cluster.items()
    }


def _load(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text, object_pairs_hook=_refuse_twice)
    except RecursionError:
        must = "not be nested as deeply as this"
        raise error("TF_CONFIG", must, text, _SHAPE) from None
    except ValueError as cause:
        must = f"be valid JSON ({cause})"
        raise error("TF_CONFIG", must, text, _SHAPE) from cause


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = sorted(name for name, _ in pairs)
        raise ValueError(f"a name occurs twice among {names}")
    return result


def _check_keys(
    field: str, found: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    unknown = sorted(set(found) - set(known) - _IGNORABLE[field])
    if unknown:
        must = f"have no other keys than {', '.join(known)}"
        raise error(field, must, unknown, "Remove them.")


def checked_spec(spec: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns a valid copy of a cluster's addresses by task type."""
    field = "TF_CONFIG.cluster"
    if not isinstance(spec, Mapping):
        raise error(field, "map task types to addresses", spec, _SHAPE)
    if "evaluator" in spec:
        raise error(
            field, "have no evaluator", sorted(spec, key=str), _EVALUATOR
        )
    for name, hosts in spec.items():
        if name not in TASK_TYPES:
            must = f"have no other task types than {', '.join(TASK_TYPES)}"
            raise error(field, must, name, "Rename or remove that entry.")
        if not isinstance(hosts, list | tuple) or not hosts:
            must = "be a list of at least one host:port"
            remedy = "Name a host for each task, or remove the entry."
            raise error(f"{field}.{name}", must, hosts, remedy)
    _check_addresses(spec)
    if len(spec.get("chief", ())) > 1:
        remedy = "Make the others workers."
        raise error(f"{field}.chief", "name one task", spec["chief"], remedy)
    if "ps" in spec and not ("chief" in spec and "worker" in spec):
        must = "name a chief and a worker if it names a ps"
        remedy = (
            "Add the missing tasks, or remove ps to train without parameter "
            "servers."
        )
        raise error(field, must, sorted(spec), remedy)
    return {name: tuple(hosts) for name, hosts in spec.items()}


def _check_addresses(spec: Mapping[str, Any]) -> None:
    taken: dict[tuple[str, int], str] = {}
    for name, hosts in spec.items():
        for index, address in enumerate(hosts):
            field = f"TF_CONFIG.cluster.{name}[{index}]"
            key = _host_and_port(field, address)
            if key in taken:
                must = f"have an address of its own, not that of {taken[key]}"
                remedy = "Give each task its own port."
                raise error(field, must, address, remedy)
            taken[key] = f"{name}[{index}]"


def _host_and_port(field: str, address: Any) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        remedy = 'Write it as "localhost:2222", without a scheme or a path.'
        raise error(field, "be host:port", address, remedy)
    host, port = match[1].lower(), int(match[2])
    if not 1 <= port <= 65535:
        remedy = "Choose a free port from 1024 up."
        raise error(field, "have a port from 1 to 65535", address, remedy)
    return ("127.0.0.1" if host == "localhost" else host), port


def check_task(
    task_type: Any, task_index: Any, spec: Mapping[str, tuple[str, ...]]
) -> None:
    """Checks that a task is one of those in the cluster."""
    field = "`task_type` (TF_CONFIG.task.type)"
    if task_type == "evaluator":
        raise error(field, "not be evaluator", task_type, _EVALUATOR)
    must = f"be one of {', '.join(spec or ('worker',))}, the types in `spec`"
    if not isinstance(task_type, str) or task_type not in (spec or ("worker",)):
        remedy = "Correct it, or list this task in the cluster."
        raise error(field, must, task_type, remedy)
    num_tasks = len(spec[task_type]) if spec else 1
    if not is_int(task_index) or not 0 <= task_index < num_tasks:
        raise error(
            "`task_index` (TF_CONFIG.task.index)",
            f"be an integer from 0 to {num_tasks - 1}",
            task_index,
            f"The cluster lists {num_tasks} {task_type} task(s); correct the "
            "index, or list this task in the cluster.",
        )


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
        spec = checked_spec(self.spec)
        object.__setattr__(self, "spec", spec)
        check_task(self.task_type, self.task_index, spec)
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
        task, spec = parse(environ.get("TF_CONFIG", ""))
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
    def addresses(self) -> dict[str, str]:
        """The `host:port` of each task of this group by name, chief first."""
        return {
            f"{job}:{index}": address
            for job in TASK_TYPES
            for index, address in enumerate(self.spec.get(job, ()))
        }

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
        return _join(self.workdir, run_files.group_name(self.group))


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
    return parse_number(name, text) if text else default


def _check_groups(group: int, num_groups: int) -> None:
    if not is_int(num_groups) or num_groups < 1:
        field = "`num_groups` (TFDISTILL_NUM_GROUPS)"
        remedy = "Use 1 for a run without other groups."
        raise error(field, "be an integer >= 1", num_groups, remedy)
    if not is_int(group) or not 0 <= group < num_groups:
        raise error(
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
    raise error(field, must, value, "Leave it out if there is none.")
