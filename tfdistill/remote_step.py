"""One step of a model on a worker whose variables live on parameter servers.

The step is a pure function of values: dense variables are read in packets
before it, metric states are handed in and out, and Keras sees all of them
through a `keras.StatelessScope`. So nothing is read twice over the network,
and no counter or metric is ever updated by two workers at once. Only the
tables of `ShardedEmbedding` are looked up where they are.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import remote_update
from tfdistill import remote_variables

Logs = dict[str, Any]


class RemoteStep:
    """Runs a model's steps on values: train, test, predict."""

    def __init__(
        self,
        model: keras.Model,
        variables: remote_variables.RemoteVariables,
        update: remote_update.RemoteUpdate | None,
    ) -> None:
        """Keeps what the steps need.

        Args:
            model: A built and compiled model.
            variables: Its variables.
            update: How to update them; None for evaluation.
        """
        self._model = model
        self._variables = variables
        self._update = update

    def train(
        self,
        data: Any,
        *,
        step: tf.Tensor,
        metrics: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], Logs]:
        """Reads all dense variables, runs one training step and updates.

        Args:
            data: One element of the data.
            step: int64 scalar, the step's own number.
            metrics: States of the metrics before the step.

        Returns:
            States of the metrics after it, and the step's logs.
        """
        found = self._variables
        if self._update is None:
            raise RuntimeError("This step was made without an update.")
        values, scalars = found.read_with_optimizer()
        num_trainable = len(found.trainable)
        mapping = [
            *zip([*found.trainable, *found.others], values, strict=True),
            *zip(found.metrics, metrics, strict=True),
            *zip(found.optimizer, scalars, strict=True),
            (found.iterations, tf.cast(step, found.iterations.dtype)),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            with self._model.updating_by(
                lambda: self._update.tape(values[:num_trainable]),
                self._update.apply,
            ):
                logs = self._model.train_step(data)
        found.assign_others(scope, values[num_trainable:])
        return [scope.get_current_value(v) for v in found.metrics], logs

    def test(
        self,
        data: Any,
        *,
        values: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[str]]:
        """Runs one evaluation step.

        Args:
            data: One element of the data.
            values: Of the dense variables, as `RemoteVariables.read` gives.
            metrics: States of the metrics before the step.

        Returns:
            States of the metrics after it, and the names of its logs.
        """
        found = self._variables
        mapping = [
            *zip([*found.trainable, *found.others], values, strict=True),
            *zip(found.metrics, metrics, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            logs = self._model.test_step(data)
        states = [scope.get_current_value(v) for v in found.metrics]
        return states, list(logs)

    def predict(self, data: Any, *, values: Sequence[tf.Tensor]) -> Any:
        """Runs inference on one element of the data.

        Args:
            data: One element of the data.
            values: Of the dense variables, as `RemoteVariables.read` gives.

        Returns:
            The model's outputs.
        """
        found = self._variables
        mapping = zip([*found.trainable, *found.others], values, strict=True)
        with keras.StatelessScope(mapping):
            return self._model.predict_step(data)
