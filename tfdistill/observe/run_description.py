"""What a training is, as text and as hyperparameters, from its model."""

import json
import types
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import strategy as strategy_lib
from tfdistill.training import global_batch


def of_model(model: Any) -> dict[str, Any]:
    """Describes a built and compiled `CodistillModel` in types of JSON."""
    strategy, student = model.distribute_strategy, model.student
    cluster = strategy_lib.cluster_of(strategy)
    return {
        "cluster": {
            "group": cluster.group,
            "num_groups": cluster.num_groups,
            "num_workers": cluster.num_workers,
            "strategy": type(strategy).__name__,
            "num_replicas": strategy.num_replicas_in_sync,
        },
        "student": {
            "name": student.name,
            "num_parameters": student.count_params() if student.built else None,
        },
        "optimizer": _described(model.optimizer),
        "loss": _described(model.loss),
        **_described(model.distillation),
        "teachers": [teacher["name"] for teacher in model.teachers.status()],
        "steps_per_execution": model.steps_per_execution,
        "dtype_policy": student.dtype_policy.name,
    }


def _described(value: Any) -> Any:
    """The class and the arguments of an object of Keras or ours."""
    if isinstance(value, Mapping):
        return {str(key): _described(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, types.FunctionType):
        return value.__name__
    if isinstance(value, global_batch.GlobalBatchLoss):
        value = value.inner
    try:
        arguments = value.get_config()
        # What can be restored is a mapping of plain values.
        arguments = json.loads(json.dumps(arguments, default=str))
    except Exception:  # A user's class may lack it, or do anything in it.
        return type(value).__name__
    return {"class": type(value).__name__, **arguments}


def markdown(configuration: Mapping[str, Any]) -> str:
    """Returns a configuration as indented JSON, which is code in Markdown."""
    text = json.dumps(configuration, indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())


def hyperparameters(
    configuration: Mapping[str, Any], within: str = ""
) -> dict[str, bool | float | str]:
    """Returns a configuration as TensorBoard's HParams need it: flat.

    Example:
        >>> hyperparameters({"optimizer": {"rate": 0.1, "steps": [1, 2]}})
        {'optimizer.rate': 0.1, 'optimizer.steps': '[1, 2]'}
    """
    found: dict[str, bool | float | str] = {}
    for key, value in configuration.items():
        if isinstance(value, Mapping):
            found |= hyperparameters(value, f"{within}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            found[f"{within}{key}"] = value
        elif value is not None:
            found[f"{within}{key}"] = json.dumps(value, default=str)
    return found
