"""What is known of one teacher besides its values: age, faults, counts."""

import logging
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdistill import staleness
from tfdistill import work_times

_log = logging.getLogger(__name__)
# Of the quarantined versions, how many of the newest a status tells.
_MAX_TOLD = 10

ABSENT, GOOD, FADING, TOO_STALE, DROPPED = (
    "absent",
    "good",
    "fading",
    "too_stale",
    "dropped",
)


class TeacherHealth:
    """The record of one teacher, for decisions and for logs.

    Attributes:
        bounds: How old its version may be.
        share_by_secs: What its version counts by its age in seconds, in
            [0, 1], as the group has agreed.
        reads: Of versions, in the background.
        last_num_bytes: Of the version put in place last; None before.
        num_swaps: Versions put in place so far.
        num_bytes: Of their files, as their manifests have it.
        num_dropped: Versions in use that were dropped.
        drop_reason: Why the version in place is not obeyed; empty where it
            is.
    """

    def __init__(
        self, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts a record.

        Args:
            name: Of the teacher, for logs.
            clock: Seconds of a clock that never goes backwards.
        """
        self.name = name
        self.clock = clock
        self.bounds = staleness.Bounds()
        self.share_by_secs = 1.0
        self.reads = work_times.WorkTimes()
        self.last_num_bytes: int | None = None
        self.num_swaps = self.num_bytes = self.num_dropped = 0
        self.drop_reason = ""
        self._first_seen: dict[int, float] = {}
        self._version = -1
        self._age_steps: int | None = None
        self._state = GOOD

    def see(self, *versions: int) -> None:
        """Notes that versions are there, -1 for none: their time begins."""
        now = self.clock()
        for version in versions:
            if version >= 0:
                self._first_seen.setdefault(version, now)

    def swapped(self, version: int, num_bytes: int) -> None:
        """Notes that a version was put in place.

        Args:
            version: Its step.
            num_bytes: Of its files.
        """
        self.see(version)
        self._first_seen = {
            step: secs
            for step, secs in self._first_seen.items()
            if step >= version
        }
        self._version, self._age_steps = version, None
        self.drop_reason, self.share_by_secs = "", 1.0
        self.num_swaps += 1
        self.num_bytes += num_bytes
        self.last_num_bytes = num_bytes

    def dropped(self, reason: str) -> None:
        """Notes that the version in place is obeyed no more."""
        self.drop_reason = reason
        self.num_dropped += 1

    @property
    def age_secs(self) -> float | None:
        """Seconds since this task first saw the version in place."""
        if self._version < 0:
            return None
        return self.clock() - self._first_seen[self._version]

    def measured_share_by_secs(self) -> float:
        """What the version in place counts by this task's clock, in [0, 1]."""
        age_secs = self.age_secs
        return 1.0 if age_secs is None else self.bounds.share_by_secs(age_secs)

    def note_step(self, step: int) -> None:
        """Notes the student's step, and logs where the teacher has aged.

        Args:
            step: The student's global step.
        """
        if self._version < 0 or self.drop_reason:
            return
        self._age_steps = step - self._version
        before, self._state = self._state, _state_of(self.share)
        if self._state in (before, GOOD):
            return
        _log.warning(
            "The teacher %s, version %d, is %d steps and %.0f s old, and the "
            "bounds are %s: %s until a newer version arrives. Does that group "
            "still run?",
            self.name,
            self._version,
            self._age_steps,
            self.age_secs,
            self.bounds,
            "it is left out"
            if self._state == TOO_STALE
            else "it counts less and less",
        )

    @property
    def share(self) -> float:
        """What the version in place counted at the last look, in [0, 1]."""
        by_steps = self.bounds.share(self._age_steps or 0, 0.0)
        return min(by_steps, self.share_by_secs)

    def describe(
        self, *, in_use: bool, rejected: Mapping[int, str]
    ) -> dict[str, Any]:
        """Describes the teacher, for logs; see `TeacherSet.status`.

        Args:
            in_use: Whether there is a version to obey.
            rejected: Quarantined versions with their reasons.
        """
        share = self.share if in_use else 0.0
        state = _state_of(share) if in_use else ABSENT
        reason = ""
        if self.drop_reason:
            state, reason = DROPPED, self.drop_reason
        elif state in (FADING, TOO_STALE):
            reason = f"older than {self.bounds}"
        elif not in_use and rejected:
            reason = rejected[max(rejected)]
        age_secs = self.age_secs
        told = sorted(rejected)[-_MAX_TOLD:]
        return {
            "name": self.name,
            "step": self._version if in_use else -1,
            "health": state,
            "reason": reason,
            "share": share,
            "age_steps": self._age_steps if in_use else None,
            "age_secs": None
            if age_secs is None or not in_use
            else round(age_secs, 1),
            "too_stale": state == TOO_STALE,
            "swaps": self.num_swaps,
            "bytes": self.num_bytes,
            "last_bytes": self.last_num_bytes,
            "read_secs": self.reads.last_secs,
            "num_dropped": self.num_dropped,
            "num_quarantined": len(rejected),
            "quarantined": {step: rejected[step] for step in told},
        }


def _state_of(share: float) -> str:
    if share >= 1.0:
        return GOOD
    return FADING if share > 0.0 else TOO_STALE
