"""What a training is, as text and as hyperparameters, from its model."""

import json
import math
import types
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api as hparams

from tfdistill.cluster import strategy as strategy_lib
from tfdistill.training import global_batch

# What groups and runs are compared by more often than by anything else.
_FIRST = (
    "group",
    "optimizer.learning_rate",
    "codistillation.weight",
    "distillation_weight.weight",
    "data.global_batch_size",
    "seed",
)


def of_model(model: Any) -> dict[str, Any]:
    """Describes a built and compiled `CodistillModel` in types of JSON."""
    strategy = model.distribute_strategy
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
            "name": model.student.name,
            "num_parameters": model.student.count_params()
            if model.student.built
            else None,
        },
        "optimizer": _described(model.optimizer),
        "loss": _described(model.loss),
        **_described(model.distillation),
        "teachers": [teacher["name"] for teacher in model.teachers.status()],
        "steps_per_execution": model.steps_per_execution,
        "dtype_policy": model.student.dtype_policy.name,
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
    configuration: Mapping[str, Any],
) -> dict[str, bool | float | str]:
    """Returns a configuration as TensorBoard's HParams need it: flat.

    Lists are JSON text; null, NaN and infinity are left out.

    Example:
        >>> hyperparameters({"optimizer": {"rate": 0.1, "steps": [1, 2]}})
        {'optimizer.rate': 0.1, 'optimizer.steps': '[1, 2]'}
    """
    return dict(_leaves((), configuration))


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves((*path, str(key)), part)
        return
    if isinstance(value, (list, tuple)):
        value = json.dumps(value, default=str)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
        if not math.isfinite(value):
            return
    elif not isinstance(value, (bool, str)):
        if value is None:
            return
        value = str(value)
    yield ".".join(path), value


def session(values: Mapping[str, Any], name: str) -> summary_pb2.Summary:
    """Returns the summary that gives a TensorBoard run its hyperparameters."""
    return hparams.hparams_pb(dict(values), trial_id=name)


def experiment(
    values: Mapping[str, Any], tags: Sequence[str]
) -> summary_pb2.Summary:
    """Returns the summary that names the columns of the HParams dashboard.

    Metrics of the validation data are preferred to others.
    """
    shown = [tag for tag in tags if tag.startswith("validation/")] or tags
    # The dashboard shows the first few.
    first = sorted(values, key=lambda name: name not in _FIRST)
    return hparams.hparams_config_pb(
        hparams=[hparams.HParam(name) for name in first],
        metrics=[hparams.Metric(tag) for tag in shown],
    )
