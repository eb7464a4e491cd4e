"""Metric states of several replicas: all read in one collective, reset in none.

Keras reads each variable of a metric by an all-reduce of its own, and again
where it resets it: TensorFlow's assignment asks for the sum before it is lost.
Eight variables cost two workers 16 rounds between two epochs, while all wait.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas

Results = dict[str, Any]


def in_replica(
    model: keras.Model, also: list[Any]
) -> tuple[Results, list[Any]]:
    """Returns the results of all replicas' metrics, and the sums of `also`."""
    variables = _added_up(model)
    sums = _summed(variables, also)
    state = list(zip(variables, sums, strict=False))
    with keras.StatelessScope(state_mapping=state):
        return model.get_metrics_result(), sums[len(variables) :]


class MetricStates:
    """Reads and resets a model's metrics between steps, on every worker."""

    def __init__(self, model: keras.Model) -> None:
        """Traces nothing yet."""
        self._model = model
        self._strategy = model.distribute_strategy
        self._variables: list[Any] = []
        self._sums: Callable[[], Any] = list

    def results(self, keras_own: Callable[[], Results]) -> Results:
        """Returns what `keras_own` makes of the replicas' sums."""
        variables = _added_up(self._model)
        if list(map(id, variables)) != list(map(id, self._variables)):
            self._variables = variables
            self._sums = tf.function(
                lambda: self._strategy.run(lambda: _summed(variables)),
                autograph=False,
            )
        sums = [self._local(value)[0] for value in self._sums()]
        state = list(zip(variables, sums, strict=True))
        with keras.StatelessScope(state_mapping=state):
            return keras_own()

    def reset(self, keras_own: Callable[[], None]) -> None:
        """Assigns what `keras_own` would, without reading what is there."""
        with keras.StatelessScope() as scope:
            keras_own()
        share = self._strategy.num_replicas_in_sync
        added_up = set(map(id, _added_up(self._model)))
        for variable in variables_of(self._model):
            value = scope.get_current_value(variable)
            if value is None:
                continue
            if id(variable) not in added_up:
                variable.assign(value)
                continue
            for own in self._local(variable.value):
                own.assign(tf.cast(value / share, own.dtype))

    def _local(self, value: Any) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(value)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of all of a model's metrics."""
    return [v for metric in model.metrics for v in metric.variables]


def _added_up(model: keras.Model) -> list[Any]:
    """Those of which each replica has its own, and the sum is what counts."""
    return [
        variable
        for variable in variables_of(model)
        if variable.aggregation == "sum"
        and isinstance(variable.value, tf.distribute.DistributedValues)
    ]


def _summed(variables: list[Any], also: list[Any] | None = None) -> list[Any]:
    # `identity` places the value on this replica's device, without which
    # MultiWorkerMirroredStrategy finds no destination for the sum.
    values = [*(v.value for v in variables), *(also or ())]
    return replicas.summed([tf.identity(value) for value in values])
