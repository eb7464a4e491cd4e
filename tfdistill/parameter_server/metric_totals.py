"""Metric states that workers computed, summed exactly on the coordinator."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdistill.training import steps

Logs = steps.Logs


class MetricTotals:
    """Sums of what executions added to a model's metric states.

    Works for metrics whose states add up over examples, as those of Keras
    do: sums, counts, histograms. Sums are float64.
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
        self._results = tf.function(self._compute, autograph=False)
        self.reset()

    @property
    def size(self) -> int:
        """Number of values in what was added."""
        return sum(value.size for value in self._initial)

    def initial(self) -> list[tf.Tensor]:
        """Returns the states of metrics that have seen nothing."""
        return [tf.constant(value) for value in self._initial]

    def added(self, states: Sequence[tf.Tensor]) -> tf.Tensor:
        """Packs what was added to the initial states, float64 `[size]`."""
        if not self.variables:
            return tf.zeros([0], tf.float64)
        return tf.concat(
            [
                tf.reshape(tf.cast(state, tf.float64) - initial, [-1])
                for state, initial in zip(states, self._initial, strict=True)
            ],
            axis=0,
        )

    def reset(self) -> None:
        """Forgets all that was added."""
        self._sum = np.zeros(self.size, np.float64)

    def add(self, added: np.ndarray) -> None:
        """Adds what one execution returned from `added`."""
        self._sum += added

    @property
    def sums(self) -> np.ndarray:
        """The sums so far, float64 `[size]`, for a backup."""
        return self._sum.copy()

    def assign(self) -> None:
        """Gives the metrics the states that the sums stand for."""
        for variable, state in zip(
            self.variables, self._states(tf.constant(self._sum)), strict=True
        ):
            variable.assign(state)

    def results(self) -> Logs:
        """Returns the metrics' results for all that was added.

        As Keras' own loops give them to callbacks: floats, and arrays.
        """
        # On this task: the metrics' own variables are on servers.
        with tf.device("CPU:0"):
            found = self._results(tf.constant(self._sum))
        arrays = {key: value.numpy() for key, value in found.items()}
        return {k: v if v.ndim else float(v) for k, v in arrays.items()}

    def _states(self, sums: tf.Tensor) -> list[tf.Tensor]:
        if not self.variables:
            return []
        parts = tf.split(sums, [v.size for v in self._initial])
        return [
            tf.cast(initial + tf.reshape(part, initial.shape), initial.dtype)
            for part, initial in zip(parts, self._initial, strict=True)
        ]

    def _compute(self, sums: tf.Tensor) -> Logs:
        mapping = zip(self.variables, self._states(sums), strict=True)
        with keras.StatelessScope(mapping):
            results = steps.flat(self._model.get_metrics_result())
            return {key: tf.convert_to_tensor(v) for key, v in results.items()}
