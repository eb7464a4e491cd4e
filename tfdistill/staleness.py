"""How far a version is still believed as it grows old."""

import dataclasses
import math

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The age up to which a version counts in full, and how it fades after.

    Attributes:
        max_steps: Steps of the student; None for no bound.
        max_secs: Seconds since this group first saw the version; None for no
            bound.
        ramp_steps: Steps after `max_steps` in which the share falls to 0, in
            a straight line. 0: it falls at once.
        ramp_secs: Likewise, seconds after `max_secs`.

    Example:
        >>> bounds = Bounds(max_steps=10, ramp_steps=4)
        >>> [bounds.share(age, 0.0) for age in (10, 11, 12, 13, 14)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    max_steps: int | None = None
    max_secs: float | None = None
    ramp_steps: int = 0
    ramp_secs: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers, under the names that a `TeacherSet` has."""
        for unit, most, ramp in (
            ("steps", self.max_steps, self.ramp_steps),
            ("secs", self.max_secs, self.ramp_secs),
        ):
            if most is not None and not 0 <= most < math.inf:
                raise ValueError(
                    f"`max_staleness_{unit}` must be >= 0 or None; received "
                    f"{most}."
                )
            if not 0 <= ramp < math.inf:
                raise ValueError(
                    f"`staleness_ramp_{unit}` must be finite and >= 0; "
                    f"received {ramp}."
                )
            if ramp and most is None:
                raise ValueError(
                    f"`staleness_ramp_{unit}` must come with a "
                    f"`max_staleness_{unit}` at which the ramp begins; "
                    f"received {ramp} without one."
                )

    def share_by_steps(self, age: tf.Tensor) -> tf.Tensor:
        """Returns the share that versions have by their age in steps.

        Args:
            age: int64, of any shape.

        Returns:
            float32 in [0, 1], of the same shape.
        """
        if self.max_steps is None:
            return tf.ones(tf.shape(age), tf.float32)
        # Whole steps are subtracted first: float32 is exact to 2**24 only.
        over = tf.maximum(age - self.max_steps, 0)
        most = max(self.ramp_steps, 1)
        fraction = tf.cast(tf.minimum(over, most), tf.float64) / float(most)
        return tf.cast(1.0 - fraction, tf.float32)

    def share_by_secs(self, age_secs: float) -> float:
        """Returns the share, in [0, 1], that a version has by its seconds."""
        return _share(age_secs, self.max_secs, self.ramp_secs)

    def share(self, age_steps: int, age_secs: float) -> float:
        """Returns the share by both ages, the lower of the two, in [0, 1]."""
        by_steps = _share(age_steps, self.max_steps, max(self.ramp_steps, 1))
        return min(by_steps, self.share_by_secs(age_secs))

    def __str__(self) -> str:
        """Returns the bounds by the names that a `TeacherSet` has."""
        named = {
            "max_staleness_steps": self.max_steps,
            "staleness_ramp_steps": self.ramp_steps or None,
            "max_staleness_secs": self.max_secs,
            "staleness_ramp_secs": self.ramp_secs or None,
        }
        return ", ".join(
            f"{name}={value}"
            for name, value in named.items()
            if value is not None
        )


def _share(age: float, most: float | None, ramp: float) -> float:
    if most is None or age <= most:
        return 1.0
    return max(0.0, 1.0 - (age - most) / ramp) if ramp else 0.0
