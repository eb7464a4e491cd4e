"""What a TeacherSet was asked for: weights, ages, bounds."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.system import run_files
from tfdistill.teachers import gates


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """What a `TeacherSet` was made with; see there for the meaning."""

    peers: tuple[int, ...] = ()
    saved_models: tuple[str, ...] = ()
    weights: Sequence[float] | None = None
    bounds: Bounds = Bounds()
    max_bad_batches: int = 3
    allow_other_graphs: bool = False
    trust_saved_models: bool = False
    schema: gates.Wanted = gates.Wanted(None, False)
    canary: Any = None
    poll_secs: float = 1.0

    def __post_init__(self) -> None:
        """Checks everything but what depends on the strategy."""
        _check_peers(self.peers)
        # Frozen: set as dataclasses do it themselves.
        object.__setattr__(
            self, "weights", _checked_weights(self.weights, self.num_teachers)
        )
        if self.max_bad_batches < 1:
            raise ValueError(
                "`max_bad_batches` must be >= 1; received "
                f"{self.max_bad_batches}."
            )
        if not self.poll_secs > 0:
            raise ValueError(
                f"`poll_secs` must be > 0; received {self.poll_secs}."
            )

    @property
    def num_teachers(self) -> int:
        """Number of peers and fixed teachers."""
        return len(self.peers) + len(self.saved_models)

    @property
    def names_of_peers(self) -> dict[int, str]:
        """The name of each peer, by group."""
        return {group: run_files.group_name(group) for group in self.peers}

    def check_remote(self) -> None:
        """Checks what a parameter-server group cannot have.

        Raises:
            ValueError: There is such a thing.
        """
        if self.saved_models or self.allow_other_graphs:
            raise ValueError(
                "Teachers of a parameter-server group must be peers with the "
                "student's own graph; received saved_models="
                f"{self.saved_models} and allow_other_graphs="
                f"{self.allow_other_graphs}. Leave them out, or train without "
                "parameter servers."
            )


def check_exchange(peers: Sequence[int], exchange: Any) -> None:
    """Checks that there is an exchange where there are peers."""
    if peers and exchange is None:
        raise ValueError(
            f"`peers` {tuple(peers)} need an `exchange`; received None."
        )


def checked_paths(saved_models: Any) -> tuple[str, ...]:
    """Returns the directories of fixed teachers.

    Raises:
        ValueError: A path was given where a list of paths must be.
    """
    if isinstance(saved_models, str | bytes | os.PathLike):
        raise ValueError(
            "`saved_models` must be a list of directories; received "
            f"{saved_models!r}. Put it into brackets."
        )
    return tuple(os.fspath(path) for path in saved_models)


def _check_peers(peers: Sequence[int]) -> None:
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )


def _checked_weights(
    weights: Sequence[float] | None, count: int
) -> list[float]:
    """Returns a weight for each of `count` teachers; equal ones for None."""
    if weights is None:
        return [1.0] * count
    found = [float(weight) for weight in weights]
    if len(found) != count or not _are_weights(found):
        raise ValueError(
            f"`weights` must hold one finite number >= 0 for each of {count} "
            f"teachers, not all of them 0; received {list(weights)}."
        )
    return found


def _are_weights(found: Sequence[float]) -> bool:
    return all(0 <= w < math.inf for w in found) and (
        not found or sum(found) > 0
    )
