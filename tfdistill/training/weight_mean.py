"""The running mean of a student's trained weights, moved inside of its step."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import layer


class WeightMean:
    """A mean that keeps `decay` of itself at each update of the weights.

    It begins with the weights that it finds. Each replica holds it for
    itself, and since replicas apply the same update, all of them are equal:
    no collective is needed. Make it in the strategy's scope.
    """

    def __init__(self, student: keras.Model, *, decay: float) -> None:
        """Takes the present weights of a built student."""
        self.decay = decay
        self._weights = list(student.trainable_variables)
        self.variables = [_mean_of(weight) for weight in self._weights]

    def move(self, is_updated: tf.Tensor) -> None:
        """Takes the weights of a step that updated them, while it is traced."""
        for mean, weight in zip(self.variables, self._weights, strict=True):
            old = tf.convert_to_tensor(mean)
            new = tf.cast(tf.convert_to_tensor(weight.value), mean.dtype)
            share = tf.cast(tf.where(is_updated, 1 - self.decay, 0), mean.dtype)
            mean.assign(old + share * (new - old))

    def values(self, variables: Sequence[Any]) -> Mapping[int, tf.Tensor]:
        """Returns the means of those variables that have one, by their `id`.

        `variables` are those of a `StudentGraph`.
        """
        known = {
            id(weight): mean
            for weight, mean in zip(self._weights, self.variables, strict=True)
        }
        found = {}
        for variable in variables:
            is_table = isinstance(variable, layer.LogicalTable)
            parts = variable.layer.shards if is_table else [variable]
            means = [known[id(part)] for part in parts if id(part) in known]
            if means:
                means = [tf.convert_to_tensor(mean) for mean in means]
                found[id(variable)] = (
                    tf.concat(means, axis=0) if len(means) > 1 else means[0]
                )
        return found


def _mean_of(weight: Any) -> tf.Variable:
    value = tf.convert_to_tensor(weight.value)
    # bfloat16 would lose most of what a step adds.
    dtype = tf.float32 if value.dtype.size < 4 else value.dtype
    return tf.Variable(
        tf.cast(value, dtype),
        trainable=False,
        name="weight_mean",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
