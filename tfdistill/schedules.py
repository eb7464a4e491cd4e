"""The distillation weight, or a temperature, as a function of the global step.

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

__all__ = ["BurnIn"]


@keras.saving.register_keras_serializable(package="tfdistill")
class BurnIn:
    """Zero for the first steps, then the full weight, with or without a ramp.

    The hard switch is `n_burn_in` of Anil et al. 2018, Algorithm 1.

    Args:
        steps: Number of steps at weight 0, >= 0; step number `steps` (counted
            from 0) is the first to distill, or the last before a ramp.
        weight: The weight from then on; finite, >= 0. Default 1.
        ramp_steps: Steps in which the weight rises evenly after the burn-in, >=
            0. Default 0: full weight at once.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = BurnIn(steps=2, weight=1.0)
        >>> [float(schedule(step)) for step in range(4)]
        [0.0, 0.0, 1.0, 1.0]
        >>> schedule = BurnIn(steps=10, weight=2.0, ramp_steps=10)
        >>> [float(schedule(step)) for step in (0, 10, 15, 20, 99)]
        [0.0, 0.0, 1.0, 2.0, 2.0]
    """

    def __init__(
        self, *, steps: int, weight: float = 1.0, ramp_steps: int = 0
    ) -> None:
        """Takes the arguments described above."""
        self.steps: int = _checked_steps("steps", steps)
        if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight` must be a finite number >= 0; received {weight!r}. "
                "0 switches distillation off."
            )
        self.weight: float = float(weight)
        self.ramp_steps: int = _checked_steps("ramp_steps", ramp_steps)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the weight at the step, float32 scalar tensor."""
        # Whole steps are subtracted first: float32 is exact to 2**24 only.
        done = tf.cast(step, tf.int64) - self.steps
        if not self.ramp_steps:
            return tf.where(done < 0, 0.0, self.weight)
        risen = tf.clip_by_value(done, 0, self.ramp_steps)
        share = tf.cast(risen, tf.float64) / float(self.ramp_steps)
        return tf.cast(self.weight * share, tf.float32)

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
        BurnIn(steps=0, weight=0.5, ramp_steps=0)
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


def _checked_steps(name: str, value: int) -> int:
    if not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(
            f"`{name}` must be a whole number of steps >= 0; received "
            f"{value!r}."
        )
    return int(value)
