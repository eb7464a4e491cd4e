"""Schedules of learning rates that recipes share."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def piecewise(
    start: float, boundaries: Sequence[int], factors: Sequence[float]
) -> Any:
    """Returns a schedule: `start` times a factor from each boundary on."""
    if not boundaries:
        return start
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        # At the step of a boundary Keras still uses the previous value.
        [mark - 1 for mark in boundaries],
        [start, *(start * factor for factor in factors)],
    )


def cosine(rate: float, num_steps: int, *, warmup_steps: int) -> Any:
    """Returns a rate that rises evenly, and falls to zero by a cosine."""
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        num_steps - warmup_steps,
        warmup_target=rate,
        warmup_steps=warmup_steps,
    )


def stepped(
    rate: float,
    boundaries: Sequence[int],
    *,
    warmup_steps: int,
    warmup_share: float,
) -> Any:
    """Returns a rate that rises from a share of it, and drops tenfold.

    Args:
        rate: The highest rate.
        boundaries: Steps from which the rate is a tenth of what it was, after
            the warm-up.
        warmup_steps: First steps, in which the rate rises evenly.
        warmup_share: Share of the rate at the first step.
    """
    after = piecewise(
        rate,
        [mark - warmup_steps for mark in boundaries],
        [0.1**number for number in range(1, len(boundaries) + 1)],
    )
    if not warmup_steps:
        return after
    return WarmUp(rate, after, steps=warmup_steps, start=warmup_share * rate)


@keras.saving.register_keras_serializable("tfdistill")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises evenly, then follows another schedule.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2).
    """

    def __init__(
        self, rate: float, after: Any, *, steps: int, start: float
    ) -> None:
        """Sets the schedule; the steps of `after` count from the warm-up."""
        super().__init__()
        if isinstance(after, dict):
            after = keras.optimizers.schedules.deserialize(after)
        self._rate, self._after = rate, after
        self._steps, self._start = steps, start

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate at a step, a float32 scalar."""
        step = tf.convert_to_tensor(step)
        since = step - tf.cast(self._steps, step.dtype)
        share = tf.cast(step, tf.float32) / self._steps
        rising = self._start + share * (self._rate - self._start)
        after = self._after
        if callable(after):
            after = after(tf.maximum(since, 0))
        return tf.where(since < 0, rising, tf.cast(after, tf.float32))

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal schedule; for `from_config`."""
        after = self._after
        if callable(after):
            after = keras.optimizers.schedules.serialize(after)
        return {
            "rate": self._rate,
            "after": after,
            "steps": self._steps,
            "start": self._start,
        }
