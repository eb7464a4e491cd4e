"""LARS: momentum with a learning rate for each layer, for large batches."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import keras_internals
from tfdistill import weight_decay as weight_decay_lib

__all__ = ["LARS"]


@keras.saving.register_keras_serializable("tfdistill")
class LARS(weight_decay_lib.KernelDecay, keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888).

    A kernel w with gradient g is updated by algorithm 1 of the paper::

        rate = trust_coefficient |w| / (|g| + weight_decay |w|)
        velocity = momentum velocity + learning_rate rate (g + weight_decay w)
        w = w - velocity

    where |.| is the Euclidean norm over the whole variable, and the rate is 1
    where |w| or |g| is 0. Biases, parameters of normalization layers and
    other variables with fewer than two dimensions have rate 1 and no decay:
    plain momentum. On several replicas g is the sum over all of them. Models
    with `ShardedEmbedding` or on parameter servers refuse this optimizer: their
    updates are single operations, and the norms of a table would need all of
    its rows.

    Args:
        learning_rate: Float or schedule; of the order of 1 to 30 for kernels.
            Default 1.
        momentum: In [0, 1). Default 0.9.
        nesterov: Whether to look ahead by Nesterov's formula. Default False.
        trust_coefficient: > 0. Default 0.001, the paper's.
        **kwargs: `weight_decay` (a float, a schedule of the step, or None, the
            default: none), clipping and others of
            `keras.optimizers.Optimizer`.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> optimizer = LARS(8.0, weight_decay=1e-4)
    """

    _is_coupled = True

    def __init__(
        self,
        learning_rate: Any = 1.0,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1); received {momentum}."
            )
        if not trust_coefficient > 0:
            raise ValueError(
                "`trust_coefficient` must be > 0; received "
                f"{trust_coefficient}."
            )
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient

    def build(self, variables: Sequence[Any]) -> None:
        """Makes a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one variable on one replica."""
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(gradient), dtype)
        rate = tf.cast(learning_rate, dtype)
        if self.is_decayed(variable):
            weights = tf.convert_to_tensor(variable)
            decay = self.weight_decay
            decay = tf.cast(0.0 if decay is None else decay, tf.float32)
            rate *= tf.cast(self._trust(weights, step, decay), dtype)
            step += tf.cast(decay, dtype) * weights
        index = keras_internals.variable_index(self, variable)
        velocity = self._velocities[index]
        momentum = tf.cast(self.momentum, dtype)
        moved = momentum * tf.convert_to_tensor(velocity) + rate * step
        self.assign(velocity, moved)
        change = momentum * moved + rate * step if self.nesterov else moved
        self.assign_sub(variable, change)

    def _trust(
        self, weights: tf.Tensor, gradient: tf.Tensor, decay: tf.Tensor
    ) -> tf.Tensor:
        # In float32, since squares of bfloat16 lose what they sum up.
        size, slope = (
            tf.norm(tf.cast(value, tf.float32)) for value in (weights, gradient)
        )
        both = tf.logical_and(size > 0, slope > 0)
        ratio = self.trust_coefficient * size / (slope + decay * size)
        return tf.where(both, ratio, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal optimizer; for `from_config`."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
        }
