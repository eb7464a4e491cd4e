"""How stale a teacher may be, and what it counts: a share in [0, 1].

A version that was made in its own burn-in counts nothing: see `in_burn_in`. All
workers find that out for themselves.

Four rules make a version count less. By its age in steps
(`max_staleness_steps`), which the training step itself applies, exactly. By its
age in seconds (`max_staleness_secs`) and in examples
(`max_staleness_examples`). And by the silence of its group, if no bound in
steps was given: see `Silence`. The chief decides on all but the first at
each refresh, and on whether a teacher is worse than the student on the canary
batch. All workers take its verdict together with the versions, so no step pays
for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.teachers import options as options_lib

ABSENT, BURN_IN, GOOD, FADING, TOO_STALE, WORSE, DROPPED = (
    "absent",
    "burn_in",
    "good",
    "fading",
    "too_stale",
    "worse",
    "dropped",
)
# In the order of the numbers that travel.
_VERDICTS = (GOOD, FADING, TOO_STALE, WORSE)
# A silent peer fades after this many of its intervals, over as many again.
SILENT_INTERVALS = 10
# An interval is a running mean, of which each new one makes up a quarter: one
# long pause, such as an evaluation, says little of the peer's pace.
_WEIGHT_OF_LAST = 0.25


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a teacher counts until the next refresh, and why."""

    share: float = 1.0
    health: str = GOOD

    def encoded(self) -> tuple[int, int]:
        """Returns two integers that hold it exactly."""
        return to_bits(self.share), _VERDICTS.index(self.health)


def decoded(bits: int, code: int) -> Verdict:
    """Returns what `Verdict.encoded` was made of."""
    return Verdict(from_bits(bits), _VERDICTS[code])


def to_bits(share: float) -> int:
    """Returns the bits of a float64 as an int64, which sums can carry."""
    return int(np.float64(share).view(np.int64))


def from_bits(bits: int) -> float:
    """Returns the float64 that `to_bits` was given."""
    return float(np.int64(bits).view(np.float64))


def share_by_steps(
    options: options_lib.TeacherOptions, age_steps: Any
) -> tf.Tensor:
    """Returns what versions that old count, float64 in [0, 1].

    All of it up to the limit, then a straight line down to 0 along the ramp.

    Example:
        >>> options = options_lib.TeacherOptions(
        ...     max_staleness_steps=10, staleness_ramp_steps=4
        ... )
        >>> share_by_steps(options, tf.range(10, 15)).numpy().tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _share(age_steps, options.most_steps, options.staleness_ramp_steps)


def share_by_secs(
    options: options_lib.TeacherOptions, age_secs: float
) -> float:
    """Returns the same for a version that was first seen so long ago."""
    age = np.float64(age_secs)
    ramp = options.staleness_ramp_secs
    return float(_share(age, options.max_staleness_secs, ramp))


def share_by_examples(
    options: options_lib.TeacherOptions, age_examples: float
) -> float:
    """Returns the same for a version of a group that had fewer examples.

    Example:
        >>> options = options_lib.TeacherOptions(max_staleness_examples=640)
        >>> share_by_examples(options, 640), share_by_examples(options, 641)
        (1.0, 0.0)
    """
    age, most = np.float64(age_examples), options.max_staleness_examples
    return float(_share(age, most, options.staleness_ramp_examples))


def _share(age: Any, most: float | None, ramp: float) -> tf.Tensor:
    if most is None:
        return tf.ones(tf.shape(age), tf.float64)
    # Exact for whole steps up to 2**53, and in float32 up to 2**24 only.
    over = tf.maximum(tf.cast(age, tf.float64) - most, 0.0)
    left = 1.0 - tf.minimum(over / ramp, 1.0) if ramp else over <= 0
    return tf.cast(left, tf.float64)


def health_by_age(share: float) -> str:
    """Returns the word for what its age leaves a version."""
    if share >= 1.0:
        return GOOD
    return FADING if share > 0.0 else TOO_STALE


# Places before a version at which a schedule is asked whether it was over.
_NUM_LOOKS_BACK = 8


def in_burn_in(weight: Callable[[tf.Tensor], Any], step: int) -> bool:
    """Whether a version of a step was made in the burn-in of a schedule.

    That is, while the distillation weight is 0 there and, as far as a few
    looks tell, before: a schedule that has fallen to 0 again is not in its
    burn-in. A ramp that begins at step 0 has none.

    Example:
        >>> ramp = lambda step: max(0, min(int(step) - 10, 5)) / 5
        >>> [in_burn_in(ramp, step) for step in (0, 10, 11, 20)]
        [True, True, False, False]
    """
    before = (step * look // _NUM_LOOKS_BACK for look in range(_NUM_LOOKS_BACK))
    return not any(
        float(weight(tf.constant(at, tf.int64)))
        for at in (max(step, 1), *before)
    )


def burn_in_reason(step: int) -> str:
    """Says why a version of the burn-in has no weight."""
    return (
        f"its version {step} is from the burn-in, in which the distillation "
        "weight is 0"
    )


class Silence:
    """How long a peer has published nothing, by the student's own steps.

    It is counted in intervals of that peer: the steps from one version to the
    next as they arrived here. Before the second version, the interval is what
    the first one's manifest says. So a slow peer is not a silent one.
    """

    def __init__(self) -> None:
        """Knows of no version yet."""
        self._since: int | None = None
        self._interval: float | None = None
        # Measured here, not taken from a manifest.
        self._is_measured = False
        self._num_refreshes = 0

    def arrived(self, step: int | None, every_steps: Any) -> None:
        """Notes that a version was put in place at a step, None if unknown.

        `every_steps` is what its manifest says of the interval, if anything.
        """
        if self._since is not None and step is not None:
            last = max(step - self._since, 1)
            before = (self._is_measured and self._interval) or last
            self._interval = before + _WEIGHT_OF_LAST * (last - before)
            self._is_measured = True
        elif self._interval is None and type(every_steps) is int:
            self._interval = max(every_steps, 1)
        self._since = step
        self._num_refreshes = 0

    def refreshed(self, step: int) -> None:
        """Notes a refresh; versions can arrive at refreshes only."""
        if self._since is None:
            self._since = step
        self._num_refreshes += 1

    @property
    def interval(self) -> float | None:
        """Steps from one version to the next; None if unknown."""
        return self._interval

    def steps(self, step: int) -> int:
        """Steps since the last version was put in place."""
        return step - (step if self._since is None else self._since)

    def share(self, step: int) -> float:
        """What the peer's silence leaves a teacher, in [0, 1]."""
        if self._interval is None:
            return 1.0
        intervals = min(self.steps(step) / self._interval, self._num_refreshes)
        over = intervals / SILENT_INTERVALS - 1
        return 1.0 - min(max(over, 0.0), 1.0)

    def state(self) -> list[Any]:
        """Returns all of it, for a backup, as JSON has it."""
        return [
            self._since,
            self._interval,
            self._is_measured,
            self._num_refreshes,
        ]

    def restore(self, state: list[Any]) -> None:
        """Takes what `state` returned."""
        self._since, self._interval = state[:2]
        self._is_measured, self._num_refreshes = state[2:]
