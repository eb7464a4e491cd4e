"""The weight of the distillation term, as a function of the global step.

A schedule is called with the step inside the traced training step. It uses
only tensor operations, so a new step value never causes a retrace. A number is
a constant weight, and any callable of the step works, such as a
`keras.optimizers.schedules.LearningRateSchedule`.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any
from typing import Self

import keras
import tensorflow as tf

__all__ = ["BurnIn", "LinearRamp"]


class _Schedule:
    """A schedule whose attributes are its constructor's arguments."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialization."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Returns the schedule that has the given configuration."""
        return cls(**config)

    def __repr__(self) -> str:
        """Returns the call that constructs this schedule."""
        items = self.get_config().items()
        arguments = ", ".join(f"{key}={value!r}" for key, value in items)
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable(package="tfdistill")
class BurnIn(_Schedule):
    """Zero for the first steps, then the full weight: a hard switch.

    This is `n_burn_in` of Anil et al. 2018, Algorithm 1.

    Args:
        steps: Number of steps at weight 0, >= 0; step number `steps` (counted
            from 0) is the first to distil.
        weight: The weight from then on; finite, >= 0. Default 1.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = BurnIn(steps=2, weight=1.0)
        >>> [float(schedule(step)) for step in range(4)]
        [0.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, *, steps: int, weight: float = 1.0) -> None:
        """Takes the arguments described above."""
        self.steps = _checked_step("steps", steps)
        self.weight = _checked_weight("weight", weight)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the weight at the step, float32 scalar tensor."""
        return tf.where(tf.cast(step, tf.int64) < self.steps, 0.0, self.weight)


@keras.saving.register_keras_serializable(package="tfdistill")
class LinearRamp(_Schedule):
    """A straight line from one weight to another; constant outside it.

    A second weight below the first makes a decay.

    Args:
        start_step: Last step at the initial weight, >= 0.
        end_step: First step at the final weight, > `start_step`.
        weight: Final weight; finite, >= 0. Default 1.
        initial: Initial weight; finite, >= 0. Default 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = LinearRamp(start_step=10, end_step=20, weight=2.0)
        >>> [float(schedule(step)) for step in (0, 10, 15, 20, 99)]
        [0.0, 0.0, 1.0, 2.0, 2.0]
    """

    def __init__(
        self,
        *,
        start_step: int,
        end_step: int,
        weight: float = 1.0,
        initial: float = 0.0,
    ) -> None:
        """Takes the arguments described above."""
        self.start_step = _checked_step("start_step", start_step)
        self.end_step = _checked_step("end_step", end_step)
        if not self.end_step > self.start_step:
            raise ValueError(
                "`end_step` must be > `start_step`; received start_step="
                f"{start_step}, end_step={end_step}. For a sudden change use "
                "BurnIn(steps=..., weight=...)."
            )
        self.weight = _checked_weight("weight", weight)
        self.initial = _checked_weight("initial", initial)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the weight at the step, float32 scalar tensor."""
        # Whole steps are subtracted first: float32 is exact to 2**24 only.
        done = tf.cast(step, tf.int64) - self.start_step
        length = self.end_step - self.start_step
        fraction = tf.cast(tf.clip_by_value(done, 0, length), tf.float64)
        share = fraction / float(length)
        mixed = self.initial * (1.0 - share) + self.weight * share
        return tf.cast(mixed, tf.float32)


def get(identifier: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the schedule that a user meant.

    Args:
        identifier: A number, which is a constant weight, or any callable of
            the int64 step that gives a scalar in graph.

    Returns:
        A callable of the step.

    Raises:
        ValueError: If it is none of these.

    Example:
        >>> get(0.5)
        BurnIn(steps=0, weight=0.5)
    """
    is_number = isinstance(identifier, numbers.Real)
    if is_number and not isinstance(identifier, bool):
        return BurnIn(steps=0, weight=float(identifier))
    if callable(identifier) and not isinstance(identifier, type):
        return identifier
    raise ValueError(
        "A distillation weight must be a number, one of tfdistill.schedules "
        f"or a callable of the step; received {identifier!r}. For example 1.0 "
        "or BurnIn(steps=1000)."
    )


def _checked_weight(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        raise ValueError(
            f"`{name}` must be a finite number >= 0; received {value!r}. "
            "0 switches distillation off."
        )
    return float(value)


def _checked_step(name: str, value: int) -> int:
    if not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(
            f"`{name}` must be a whole number of steps >= 0; received "
            f"{value!r}."
        )
    return int(value)
