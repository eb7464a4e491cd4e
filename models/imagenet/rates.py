"""Learning rates that warm up and then drop in steps."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_DROP = 0.1


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
        warmup_share: Of the rate, at the first step.
    """
    after = piecewise(
        rate,
        [mark - warmup_steps for mark in boundaries],
        [_DROP**number for number in range(1, len(boundaries) + 1)],
    )
    if not warmup_steps:
        return after
    return WarmUp(
        rate,
        warmup_steps=warmup_steps,
        warmup_from=warmup_share * rate,
        after=after if boundaries else None,
    )


@keras.saving.register_keras_serializable("tfdistill")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises evenly, then follows another schedule.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2).
    """

    def __init__(
        self,
        rate: float,
        *,
        warmup_steps: int,
        warmup_from: float = 0.0,
        after: Any = None,
    ) -> None:
        """Sets the schedule.

        The steps of `after` count from the end of the warm-up.
        """
        super().__init__()
        self._rate = rate
        self._warmup_steps = warmup_steps
        self._warmup_from = warmup_from
        self._after = after

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate at a step, a float32 scalar."""
        step = tf.convert_to_tensor(step)
        since = step - tf.cast(self._warmup_steps, step.dtype)
        share = tf.cast(step, tf.float32) / self._warmup_steps
        rising = self._warmup_from + share * (self._rate - self._warmup_from)
        after = tf.cast(
            self._after(tf.maximum(since, 0)) if self._after else self._rate,
            tf.float32,
        )
        return tf.where(since < 0, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal schedule; for `from_config`."""
        after = self._after
        return {
            "rate": self._rate,
            "warmup_steps": self._warmup_steps,
            "warmup_from": self._warmup_from,
            "after": after and keras.optimizers.schedules.serialize(after),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Returns the schedule that `get_config` has described."""
        after = config["after"]
        return cls(
            **{
                **config,
                "after": after
                and keras.optimizers.schedules.deserialize(after),
            }
        )
