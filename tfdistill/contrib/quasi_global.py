"""Quasi-global momentum, for groups whose data differ.

Lin et al. 2021, arXiv:2102.04761: momentum of what a mix left of the steps.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import optimizers


@keras.saving.register_keras_serializable("tfdistill")
class QuasiGlobalMomentum(keras.optimizers.Optimizer):
    """SGD with momentum from the weights' change after mixes (Lin et al. 2021).

    Local momentum follows the gradients of one group's data. If groups mix
    their weights and their data differ, it leads each
    group away from the others. Here the buffer m follows the weights x
    themselves, over a step and the mix after it, as in algorithm 1 (QG-DSGDm)
    of arXiv:2102.04761. A step at the rate r with the gradient g is::

        x' = x - r (momentum m + g)
        x_next = x' if nothing was mixed, else the mix of x' with the peers'
        m = momentum m + (1 - momentum) (x - x_next) / r

    Mixing only assigns to the variables between two steps: so the
    optimizer keeps the x of its last step, and updates m at the start of the
    next one. Nothing is sent but the weights. With mixes every k steps, pass
    `every_steps=k`: m then stays as it is for k steps and follows their mean
    step, (x - x after k steps and the mix) / (sum of the k rates), as the
    authors' code has it at a constant rate.

    The buffer and the kept weights are two variables of the size of the model.
    Weight decay is part of the difference, as in the authors' code, and may be
    one of kernels: `with_kernel_decay(QuasiGlobalMomentum, coupled=True)`.
    Models with `ShardedEmbedding` or on parameter servers refuse this
    optimizer: a table's rows move only if a batch has their ids, and the
    weights of the last step would be a second table.

    Args:
        learning_rate: Float or `LearningRateSchedule`. Default 0.01.
        momentum: In [0, 1). Default 0.9, as in the authors' experiments.
        nesterov: Whether to look ahead, as QG-DSGDm-N does:
            x' = x - r (g + momentum (momentum m + g)). Default False.
        every_steps: Steps over which a difference is taken, >= 1. Default 1.
            Give the mixer's number.
        **kwargs: `weight_decay`, clipping, `use_ema` and others of
            `keras.optimizers.Optimizer`.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> optimizer = QuasiGlobalMomentum(0.1, nesterov=True, clipnorm=1.0)
    """

    def __init__(
        self,
        learning_rate: float
        | keras.optimizers.schedules.LearningRateSchedule = 0.01,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        every_steps: int = 1,
        **kwargs: object,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1); received {momentum}."
            )
        if every_steps < 1:
            raise ValueError(
                f"`every_steps` must be >= 1; received {every_steps}."
            )
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.every_steps = every_steps

    def build(self, variables: Sequence[Any]) -> None:
        """Makes a buffer for each variable, and room for the last weights."""
        if self.built:
            return
        super().build(variables)
        self._buffers = self.add_optimizer_variables(variables, "buffer")
        self._lasts = self.add_optimizer_variables(variables, "last")
        # Sums of the rates of the steps since; 0 before the first step.
        self._rates = [
            self.add_variable((), dtype="float32", name=f"rates_{number}")
            for number in range(len(variables))
        ]

    def update_step(
        self,
        gradient: tf.Tensor,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates one variable on one replica."""
        index = optimizers.variable_index(self, variable)
        dtype = variable.dtype
        weights = tf.convert_to_tensor(variable)
        slope = tf.cast(tf.convert_to_tensor(gradient), dtype)
        momentum = tf.cast(self.momentum, dtype)
        buffer = self._followed(index, weights, learning_rate)
        change = momentum * buffer + slope
        if self.nesterov:
            change = slope + momentum * change
        self.assign_sub(variable, tf.cast(learning_rate, dtype) * change)

    def _followed(
        self, index: int, weights: tf.Tensor, learning_rate: tf.Tensor
    ) -> tf.Tensor:
        """Returns the buffer, moved by the steps that are now complete."""
        buffer, last = self._buffers[index], self._lasts[index]
        rates = self._rates[index]
        decay = tf.cast(self.momentum, weights.dtype)
        before = tf.convert_to_tensor(buffer)
        # No step yet, or only steps at rate 0: nothing that a rate scales.
        step = tf.math.divide_no_nan(
            tf.convert_to_tensor(last) - weights,
            tf.cast(tf.convert_to_tensor(rates), weights.dtype),
        )
        moved = decay * before + (1 - decay) * step
        rate = tf.cast(learning_rate, tf.float32)
        if self.every_steps == 1:
            self.assign(last, weights)
            self.assign(rates, rate)
        else:
            steps = tf.convert_to_tensor(self.iterations)
            is_due = tf.equal(steps % self.every_steps, 0)
            moved = tf.where(is_due, moved, before)
            self.assign(last, tf.where(is_due, weights, last))
            self.assign(rates, tf.where(is_due, 0.0, rates) + rate)
        self.assign(buffer, moved)
        return moved

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal optimizer; for `from_config`."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "every_steps": self.every_steps,
        }
