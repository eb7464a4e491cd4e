"""Metric states that workers computed, joined on the coordinator."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.training import metric_joins
from tfdistill.training import steps

Logs = steps.Logs
_ADDED_UP = (None, *metric_joins.ADDED_UP)
# Joins a state after two executions; `none` is the state before any.
_JOINED: dict[str, Callable[[Any, Any, Any], Any]] = {
    metric_joins.MAX: lambda one, other, none: np.maximum(one, other),
    metric_joins.MIN: lambda one, other, none: np.minimum(one, other),
    metric_joins.MEAN: lambda one, other, none: np.where(
        other == none, one, other
    ),
}


class MetricTotals:
    """What executions made of a model's metric states, as one state each.

    What they added to sums, counts and histograms is added up, in float64. Of
    maxima, minima and states that are the same everywhere, the states count.
    """

    def __init__(self, model: keras.Model) -> None:
        """Starts at the initial states of the metrics, which are built."""
        self._model = model
        self.variables = [v for m in model.metrics for v in m.variables]
        with keras.StatelessScope() as scope:
            model.reset_metrics()
        self._initial = [
            np.zeros(v.shape, keras.backend.standardize_dtype(v.dtype))
            if scope.get_current_value(v) is None
            else np.asarray(scope.get_current_value(v))
            for v in self.variables
        ]
        # How each variable joins; a trace finds it where it is None. A value
        # declared not to be a sum is the same wherever it is assigned.
        self._joins: list[str | None] = [
            None if variable.aggregation == "sum" else metric_joins.MEAN
            for variable in self.variables
        ]
        self._results = tf.function(self._compute, autograph=False)
        self._settle()
        self.reset()

    def _settle(self) -> None:
        """Makes of what is known of each variable what each value needs."""
        sizes = [value.size for value in self._initial]

        def values(of_each: Sequence[Any]) -> np.ndarray:
            return np.repeat(np.asarray(of_each), sizes)

        flat = [np.zeros(0), *(value.ravel() for value in self._initial)]
        start = np.concatenate(flat, dtype=np.float64)
        is_added = values([join in _ADDED_UP for join in self._joins])
        # Subtracted from a state to find what was added to it; and the part
        # that states without data have.
        self._base = np.where(is_added, start, 0.0)
        self._nothing = np.where(is_added, 0.0, start)
        self._joined = [
            (where, join)
            for name, join in _JOINED.items()
            if (where := values([name == each for each in self._joins])).any()
        ]

    @property
    def size(self) -> int:
        """Number of values in what was added."""
        return sum(value.size for value in self._initial)

    def initial(self) -> list[tf.Tensor]:
        """Returns the states of metrics that have seen nothing."""
        return [tf.constant(value) for value in self._initial]

    def traced(
        self, before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]
    ) -> None:
        """Looks at what a step, which is being traced, makes of the states."""
        for index, variable in enumerate(self.variables):
            if self._joins[index] is not None:
                continue
            join = metric_joins.of_values(before[index], after[index])
            self._joins[index] = join
            if join == metric_joins.OTHER:
                metric_joins.warn_of_other(variable, parts="workers")
        self._settle()

    def added(self, states: Sequence[tf.Tensor]) -> tf.Tensor:
        """Packs what was added to the initial states, float64 `[size]`.

        Of states that do not add up it holds the states.
        """
        flat = [tf.reshape(tf.cast(each, tf.float64), [-1]) for each in states]
        return tf.concat([tf.zeros([0], tf.float64), *flat], 0) - self._base

    def reset(self) -> None:
        """Forgets all that was added."""
        self._sum: np.ndarray | None = None

    def add(self, added: np.ndarray) -> None:
        """Adds what one execution returned from `added`."""
        before = self.sums
        self._sum = before + added
        for where, join in self._joined:
            self._sum[where] = join(
                before[where], added[where], self._nothing[where]
            )

    @property
    def sums(self) -> np.ndarray:
        """The sums so far, float64 `[size]`, for a backup."""
        return (self._nothing if self._sum is None else self._sum).copy()

    def assign(self) -> None:
        """Gives the metrics the states that the sums stand for."""
        for variable, state in zip(
            self.variables, self._states(self._flat()), strict=True
        ):
            variable.assign(state)

    def results(self) -> Logs:
        """Returns the metrics' results for all that was added.

        As Keras' own loops give them to callbacks: floats, and arrays.
        """
        # On this task: the metrics' own variables are on servers.
        with tf.device("CPU:0"):
            found = self._results(self._flat())
        arrays = {key: value.numpy() for key, value in found.items()}
        return {k: v if v.ndim else float(v) for k, v in arrays.items()}

    def _flat(self) -> tf.Tensor:
        return tf.constant(self._base + self.sums)

    def _states(self, flat: tf.Tensor) -> list[tf.Tensor]:
        if not self.variables:
            return []
        parts = tf.split(flat, [v.size for v in self._initial])
        return [
            tf.cast(tf.reshape(part, initial.shape), initial.dtype)
            for part, initial in zip(parts, self._initial, strict=True)
        ]

    def _compute(self, flat: tf.Tensor) -> Logs:
        mapping = zip(self.variables, self._states(flat), strict=True)
        with keras.StatelessScope(mapping):
            results = steps.flat(self._model.get_metrics_result())
            return {key: tf.convert_to_tensor(v) for key, v in results.items()}
