"""Metric states of several replicas: all read in one collective, reset in none.

Keras reads each variable of a metric by a separate all-reduce, and again when
it resets it: TensorFlow's assignment fetches the sum before it is lost. Eight
variables cost two workers 16 rounds between two epochs, while all wait.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.training import metric_joins

Results = dict[str, Any]


class MetricStates:
    """Reads and resets a model's metrics between steps, on every worker."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._read: list[Any] = []
        self._sums: Callable[[], Any] = list
        # By the id of a variable: how its states join, once a trace has shown
        # it, and until then what they were reset to.
        self._joins: dict[int, str] = {}
        self._was_reset_to: dict[int, Any] = {}

    def traced(self) -> None:
        """Looks at what a step assigns, in the graph that is being built."""
        if tf.executing_eagerly():
            return
        variables = [
            variable
            for variable in self._apart()
            if variable.aggregation == "sum" and id(variable) not in self._joins
        ]
        found = metric_joins.of_variables(
            tf.compat.v1.get_default_graph(),
            [self._local(variable.value)[0].handle for variable in variables],
        )
        for variable, join in zip(variables, found, strict=True):
            if join is None:
                continue
            self._joins[id(variable)] = join
            if join == metric_joins.OTHER and replicas.is_chief(self._strategy):
                metric_joins.warn_of_other(variable, parts="replicas")
            reset_to = self._was_reset_to.pop(id(variable), None)
            if reset_to is not None and join not in metric_joins.ADDED_UP:
                with tf.init_scope():  # No step has been run yet.
                    self._undo_share(variable, reset_to)

    def _undo_share(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Resets to a whole value, unless a backup was restored since."""
        for own in self._local(variable.value):
            whole = tf.cast(value, own.dtype)
            if bool(tf.reduce_all(own == self._share_of(whole))):
                own.assign(whole)

    def _share_of(self, value: tf.Tensor) -> Any:
        """What each replica starts with, for a sum over them."""
        return tf.cast(value / self._strategy.num_replicas_in_sync, value.dtype)

    def in_replica(self, also: list[Any]) -> tuple[Results, list[Any]]:
        """Returns the results of all replicas' metrics, and sums of `also`."""
        variables = self._apart()
        joined = self._joined(variables, also)
        state = list(zip(variables, joined, strict=False))
        with keras.StatelessScope(state_mapping=state):
            found = _values(self._model.get_metrics_result())
        return found, joined[len(variables) :]

    def results(self, keras_own: Callable[[], Results]) -> Results:
        """Returns what `keras_own` makes of the states of all replicas."""
        variables = self._apart()
        read = [(id(v), self._join(v)) for v in variables]
        if read != self._read:
            self._read = read
            self._sums = tf.function(
                lambda: self._strategy.run(lambda: self._joined(variables)),
                autograph=False,
            )
        sums = [self._local(value)[0] for value in self._sums()]
        state = list(zip(variables, sums, strict=True))
        with keras.StatelessScope(state_mapping=state):
            return _values(keras_own())

    def reset(self, keras_own: Callable[[], None]) -> None:
        """Assigns what `keras_own` would, without reading what is there."""
        with keras.StatelessScope() as scope:
            keras_own()
        apart = set(map(id, self._apart()))
        for variable in variables_of(self._model):
            value = scope.get_current_value(variable)
            if value is None:
                continue
            if id(variable) not in apart:
                variable.assign(value)
                continue
            join = self._join(variable)
            if (
                variable.aggregation == "sum"
                and id(variable) not in self._joins
            ):
                self._was_reset_to[id(variable)] = value
            for own in self._local(variable.value):
                whole = tf.cast(value, own.dtype)
                is_shared = join in metric_joins.ADDED_UP
                own.assign(self._share_of(whole) if is_shared else whole)

    def _apart(self) -> list[Any]:
        """The variables of which each replica has its own, and all are used."""
        return [
            variable
            for variable in variables_of(self._model)
            if variable.aggregation in ("sum", "mean")
            and isinstance(variable.value, tf.distribute.DistributedValues)
        ]

    def _join(self, variable: keras.Variable) -> str:
        if variable.aggregation == "mean":
            return metric_joins.MEAN
        return self._joins.get(id(variable), metric_joins.SUM)

    def _joined(
        self, variables: list[Any], also: list[Any] | None = None
    ) -> list[Any]:
        """Returns the states of all replicas as one, and sums of `also`."""
        # `identity` places the value on this replica's device, without which
        # MultiWorkerMirroredStrategy finds no destination for the sum.
        values = [tf.identity(v.value) for v in variables]
        joins = [self._join(variable) for variable in variables]
        parts = [
            _row(value) if join in metric_joins.EXTREMES else value
            for value, join in zip(values, joins, strict=True)
        ]
        sums = replicas.summed([*parts, *map(tf.identity, also or ())])
        states = [
            self._state(total, join)
            for total, join in zip(sums, joins, strict=False)
        ]
        return states + sums[len(variables) :]

    def _state(self, total: tf.Tensor, join: str) -> Any:
        if join == metric_joins.MEAN:
            return self._share_of(total)
        if join in metric_joins.EXTREMES:
            return metric_joins.EXTREMES[join](total, axis=0)
        return total

    def _local(self, value: object) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(value)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of all of a model's metrics."""
    return [v for metric in model.metrics for v in metric.variables]


def _values(results: Results) -> Results:
    """Reads variables that are results where they have the joined states."""
    return keras.tree.map_structure(
        lambda v: v.value if isinstance(v, keras.Variable) else v, results
    )


def _row(value: tf.Tensor) -> Any:
    """Returns a value as this replica's row among zeros, for a sum."""
    context: Any = tf.distribute.get_replica_context()
    own = context.replica_id_in_sync_group
    after = context.num_replicas_in_sync - 1 - own
    rest = [[0, 0]] * value.shape.rank
    return tf.pad(value[None], [[own, after], *rest])
