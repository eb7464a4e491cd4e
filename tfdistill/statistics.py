"""Batch statistics, which each replica keeps for itself, brought together.

Keras 3's `BatchNormalization` updates its moving mean and variance on every
replica from that replica's rows. They only matter in inference, so they are
averaged over the replicas whenever the student is looked at from outside:
before an export, an evaluation and a file.
"""

import keras
import tensorflow as tf


class BatchStatistics:
    """The variables of one model that replicas update on their own."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        """Finds them: float variables that no optimizer updates.

        Args:
            model: A built model.
            strategy: The strategy that it was made under.
        """
        self._strategy = strategy
        self._variables = [
            variable
            for variable in model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
            and variable.aggregation in (None, "none")
        ]
        self._average = tf.function(lambda: strategy.run(self._in_replica))

    def average(self) -> None:
        """Gives all replicas the mean of their statistics.

        A collective: every worker of the group calls it at the same step.
        """
        if self._variables and self._strategy.num_replicas_in_sync > 1:
            self._average()

    def _in_replica(self) -> None:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(
            tf.distribute.ReduceOp.MEAN,
            [tf.identity(variable.value) for variable in self._variables],
        )
        for variable, mean in zip(self._variables, means, strict=True):
            variable.assign(mean)
