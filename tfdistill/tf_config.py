"""Reads TF_CONFIG and says what is wrong with it."""

import json
import re
from collections.abc import Mapping
from typing import Any

TASK_TYPES = ("chief", "worker", "ps")
# Keys that hosted services add and that say nothing about the cluster.
_IGNORABLE = {
    "TF_CONFIG": {"environment", "job", "rpc_layer"},
    "TF_CONFIG.task": {"cloud", "trial"},
}
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_EVALUATOR = (
    "TensorFlow waits for an evaluator for ever. Remove it, and run the "
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

    Args:
        text: The variable's value. Empty text and `{}` count as unset.

    Returns:
        The task as `{"type": ..., "index": ...}` and the cluster, of which
        only the outer shape has been checked; both empty if it is unset.

    Raises:
        ValueError: Naming the field that is wrong.
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
    return {"type": task["type"], "index": index}, config["cluster"]


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
    """Returns a valid copy of a cluster's addresses by task type.

    Raises:
        ValueError: If the addresses cannot make up one running cluster.
    """
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
        must = "name a chief and a worker where it names a ps"
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
    """Checks that a task is one of those in the cluster.

    Raises:
        ValueError: Naming the field that is wrong.
    """
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
