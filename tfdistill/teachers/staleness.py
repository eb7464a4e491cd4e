"""The weight of a peer's version by its age: the only rule for it.

The age of a version is the student's step minus the version's step. By default
a version keeps its full weight as long as its group keeps publishing, whatever
the age: a slow peer is not a silent peer. The weight of a group that has
published nothing for ten of its intervals fades, over ten more.
"""

import dataclasses
import math
from typing import Any

from tfdistill.teachers import teacher

# A value of `max_staleness_steps`: a peer that falls silent fades.
AUTO = "auto"
# A silent peer fades after this many of its intervals, over as many again.
_SILENT_INTERVALS = 10
# An interval is a running mean, of which each new one makes up a quarter: one
# long pause, such as an evaluation, says little of the peer's pace.
_WEIGHT_OF_LAST = 0.25


def checked(max_staleness_steps: Any) -> int | str | None:
    """Returns what `max_staleness_steps` was given, if it fits."""
    is_number = type(max_staleness_steps) is int and max_staleness_steps >= 0
    if not is_number and max_staleness_steps not in (AUTO, None):
        raise ValueError(
            "`max_staleness_steps` must be a number of steps >= 0, None or "
            f'"{AUTO}"; received {max_staleness_steps!r}.'
        )
    return max_staleness_steps


@dataclasses.dataclass
class Silence:
    """How long a peer has published nothing, by the student's own steps.

    It is counted in intervals of that peer: the steps from one version to the
    next as they arrived here, but at least what manifests say: versions that a
    busy machine held up arrive one right after the other. All workers count
    alike. A backup keeps the fields, in this order.
    """

    since: int | None = None
    measured: float | None = None
    announced: int | None = None
    num_refreshes: int = 0

    @property
    def interval(self) -> float | None:
        """Steps from one version to the next; None if unknown."""
        known = self.measured, self.announced
        return max((each for each in known if each is not None), default=None)

    def arrived(self, step: int | None, every_steps: object) -> None:
        """Notes that a version was put in place at a step, None if unknown.

        `every_steps` is what its manifest says of the interval, if anything.
        """
        if self.since is not None and step is not None:
            last = max(step - self.since, 1)
            before = self.measured or last
            self.measured = before + _WEIGHT_OF_LAST * (last - before)
        if type(every_steps) is int:
            self.announced = max(every_steps, 1)
        self.since = step
        self.num_refreshes = 0

    def refreshed(self, step: int) -> None:
        """Notes a refresh; versions can arrive at refreshes only."""
        if self.since is None:
            self.since = step
        self.num_refreshes += 1

    def share(self, step: int, *, version: int) -> float:
        """What the peer's silence leaves its version, in [0, 1].

        A version that is ahead of the student is not old: the peer may have
        finished. Its silence counts from there on.
        """
        over = self.intervals(step, version=version) / _SILENT_INTERVALS - 1
        return 1.0 - min(max(over, 0.0), 1.0)

    def intervals(self, step: int, *, version: int) -> float:
        """How many intervals ago a version arrived; 0 if that is unknown."""
        if self.interval is None:
            return 0.0
        since = max(step if self.since is None else self.since, version)
        return min((step - since) / self.interval, self.num_refreshes)


def standing(
    version: int,
    now: int | None,
    *,
    max_staleness_steps: int | str | None,
    silence: Silence,
) -> teacher.Standing:
    """Returns what a version counts at a step of the student, and why."""
    age = 0 if now is None else now - version
    health, reason, share, last = teacher.GOOD, "", 1.0, math.inf
    if isinstance(max_staleness_steps, int):
        last = version + max_staleness_steps
        if age > max_staleness_steps:
            health, share = teacher.TOO_STALE, 0.0
            reason = (
                f"it is {age} steps old, beyond "
                f"max_staleness_steps={max_staleness_steps}"
            )
    elif max_staleness_steps == AUTO and now is not None:
        share = silence.share(now, version=version)
        if share < 1:
            health = teacher.FADING
            reason = (
                "its group no longer publishes usable versions: this one is "
                f"{age} steps old, and they used to come every "
                f"{silence.interval:.0f} steps"
            )
    return teacher.Standing(
        health, reason, share, step=version, last_step=last, age_steps=age
    )
