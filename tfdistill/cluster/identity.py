"""Which task of which group this process is, to and from the environment."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import method as method_lib
from tfdistill.system import run_files

TASK_TYPES = ("chief", "worker", "ps")
# Keys that hosted services add and that say nothing about the cluster.
_IGNORABLE = {"environment", "job", "rpc_layer", "cloud", "trial"}
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_EVALUATOR = (
    "TensorFlow waits for an evaluator forever. Remove it, and run the "
    "evaluation as a separate program without TF_CONFIG."
)
_SHAPE = (
    'Set it to {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
    '"worker", "index": 0}}, or unset it to run one task.'
)
# Every TFDISTILL_ variable that some part of the library reads. A name outside
# this list is refused: it is most likely a typing error.
KNOWN_VARIABLES = frozenset(
    {
        "TFDISTILL_CHIEF_RETURN_SECS",
        "TFDISTILL_CHIEF_WAS_THERE",
        "TFDISTILL_DATA",
        "TFDISTILL_EVERY_STEPS",
        "TFDISTILL_EXCHANGE",
        "TFDISTILL_EXCHANGE_KEY",
        "TFDISTILL_EXCHANGE_KEY_FILE",
        "TFDISTILL_GROUP",
        "TFDISTILL_HELD_OUT",
        "TFDISTILL_METHOD",
        "TFDISTILL_NUM_GROUPS",
        "TFDISTILL_READY_FILE",
        "TFDISTILL_SEED",
        "TFDISTILL_STALL_TIMEOUT_SECS",
        "TFDISTILL_START_TIMEOUT_SECS",
        "TFDISTILL_WEIGHT_DECAY",
        "TFDISTILL_WORKDIR",
    }
)


def error(field: str, must: str, received: object, remedy: str) -> ValueError:
    """Returns the one form that all errors about the environment take."""
    text = repr(received)
    text = text if len(text) <= 200 else text[:200] + "..."
    return ValueError(f"{field} must {must}; received {text}. {remedy}")


def parse(text: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Splits the JSON text of TF_CONFIG into its task and its cluster.

    Both are empty if it is unset, that is empty or `{}`. Only the outer shape
    of the cluster has been checked.
    """
    try:
        config = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError) as cause:
        raise error(
            "TF_CONFIG", f"be valid JSON ({cause})", text, _SHAPE
        ) from cause
    if config == {}:
        return {}, {}
    _check_keys("TF_CONFIG", config, ("cluster", "task"))
    task, cluster = config["task"], config["cluster"]
    _check_keys("TF_CONFIG.task", task, ("type", "index"))
    kind, index = task["type"], task["index"]
    # TensorFlow accepts an index in quotes.
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    # As SageMaker and older services call the chief.
    if isinstance(cluster, dict) and "master" in cluster:
        if "chief" in cluster:
            must = "name a chief or a master, which is the same task"
            remedy = "Remove one of them."
            raise error("TF_CONFIG.cluster", must, sorted(cluster), remedy)
        kind = "chief" if kind == "master" else kind
        cluster = {"chief": cluster["master"], **cluster}
        del cluster["master"]
    if not cluster:
        must = "name at least one task"
        raise error("TF_CONFIG.cluster", must, cluster, _SHAPE)
    return {"type": kind, "index": index}, cluster


def _check_keys(field: str, found: object, keys: tuple[str, ...]) -> None:
    known = {*keys, *_IGNORABLE}
    if not isinstance(found, dict) or not {*keys} <= set(found) <= known:
        must = f"be a JSON object with {' and '.join(keys)}, and nothing else"
        raise error(field, must, found, _SHAPE)


def _checked_spec(spec: object) -> dict[str, tuple[str, ...]]:
    field = "TF_CONFIG.cluster"
    if not isinstance(spec, Mapping) or not all(
        name in TASK_TYPES
        and isinstance(hosts, list | tuple)
        and hosts
        and all(map(_is_address, hosts))
        for name, hosts in spec.items()
    ):
        raise error(
            field,
            f"have lists of host:port for {', '.join(TASK_TYPES)}",
            spec,
            _EVALUATOR
            if isinstance(spec, Mapping) and "evaluator" in spec
            else _SHAPE,
        )
    addresses = [address for hosts in spec.values() for address in hosts]
    if len(set(addresses)) != len(addresses):
        remedy = "Give each task its own port."
        raise error(field, "have each address once", addresses, remedy)
    if len(spec.get("chief", ())) > 1:
        must, remedy = "name one task", "Make the others workers."
        raise error(f"{field}.chief", must, spec["chief"], remedy)
    if "ps" in spec and not {"chief", "worker"} <= set(spec):
        raise error(
            field,
            "name a chief and a worker if it names a ps",
            sorted(spec),
            "Add the missing tasks, or remove ps to train without parameter "
            "servers.",
        )
    return {name: tuple(hosts) for name, hosts in spec.items()}


def _is_address(address: object) -> bool:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    return match is not None and 1 <= int(match[2]) <= 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A task's place in its group, and its group's place in the run.

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
        method: What `tfdistill compare` decides for this run; None (default)
            outside of a comparison.

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
    method: method_lib.Method | None = None

    def __post_init__(self) -> None:
        """Validates the fields and fills in the default exchange."""
        if type(self.num_groups) is not int or self.num_groups < 1:
            raise error(
                "`num_groups` (TFDISTILL_NUM_GROUPS)",
                "be an integer >= 1",
                self.num_groups,
                "Use 1 for a run of one group.",
            )
        if type(self.group) is not int or self.group not in range(
            self.num_groups
        ):
            raise error(
                "`group` (TFDISTILL_GROUP)",
                f"be from 0 to num_groups - 1 = {self.num_groups - 1}",
                self.group,
                "Set TFDISTILL_NUM_GROUPS to the number of groups in the run.",
            )
        object.__setattr__(self, "spec", _checked_spec(self.spec))
        tasks = list(self.addresses) or ["worker:0"]
        if type(self.task_index) is not int or self.task_name not in tasks:
            raise error(
                "`task_type` and `task_index` (TF_CONFIG.task)",
                f"be one of {', '.join(tasks)}",
                (self.task_type, self.task_index),
                _EVALUATOR
                if self.task_type == "evaluator"
                else "Correct them, or list this task in the cluster.",
            )
        if self.exchange is None and self.workdir is not None:
            exchange = f"{self.workdir.rstrip('/')}/exchange"
            object.__setattr__(self, "exchange", exchange)

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
            group=method_lib.number(environ, "TFDISTILL_GROUP", least=0) or 0,
            num_groups=method_lib.number(
                environ, "TFDISTILL_NUM_GROUPS", least=1
            )
            or 1,
            exchange=environ.get("TFDISTILL_EXCHANGE") or None,
            workdir=environ.get("TFDISTILL_WORKDIR") or None,
            method=method_lib.from_env(environ),
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
        if self.method is not None:
            environ |= self.method.to_env()
        return environ

    @property
    def uses_parameter_servers(self) -> bool:
        """Whether this group trains under a parameter-server strategy."""
        return "ps" in self.spec

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
        return self.task_name == next(iter(self.addresses), "worker:0")

    @property
    def task_name(self) -> str:
        """Type and index, such as `"worker:1"`."""
        return f"{self.task_type}:{self.task_index}"

    @property
    def address(self) -> str | None:
        """This task's `host:port`; None for a task on its own."""
        return self.addresses.get(self.task_name)

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

    @property
    def group_dir(self) -> str | None:
        """This group's own directory in the workdir; None without one."""
        if self.workdir is None:
            return None
        # Not os.path: it may be a URL.
        return f"{self.workdir.rstrip('/')}/{run_files.group_name(self.group)}"


def _check_names(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if not name.startswith("TFDISTILL_") or name in KNOWN_VARIABLES:
            continue
        # A mistyped name of the key must not put the key into a log.
        value = "a value" if "KEY" in name else repr(environ[name])
        raise ValueError(
            f"{name} is not a variable that tfdistill reads; received "
            f"{value}. Unset it or use one of: "
            f"{', '.join(sorted(KNOWN_VARIABLES))}."
        )
