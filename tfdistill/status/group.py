"""What is known of a run and its groups, from the lines that groups write."""

import collections
import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import versions

# A user's own kind of teacher may report less.
_UNKNOWN_TEACHER: dict[str, Any] = {
    **{"name": "?", "step": -1, "health": "", "reason": "", "share": None},
    **{"age_steps": None, "num_quarantined": 0, "quarantined": {}},
}
_Pace = collections.deque[tuple[float, float]]


@dataclasses.dataclass
class GroupStatus:
    """What is known of one group.

    Attributes:
        group: Index of the group.
        state: `starting`, `running`, `stopping`, `done`, `failed`, `stopped`,
            `restarting`; seen from a run's files only, also `silent`, `lost`
            or `unknown`.
        record: The newest value of every key seen in the group's metrics.
        newest: Its newest version in the exchange; None if none is known.
        num_restarts: How often it was started again as a whole.
        num_worker_restarts: How often workers of it were started again, since
            it was last started itself.
        last_error: Why it, or a task of it, last failed; empty if none did.
        starting: Which part of its start its first task is at, such as
            `tracing`; empty before `make_strategy` and after its first step.
        silent_secs: Of a group in the state `silent`: since when.
        warnings: Of its launcher, each once.
    """

    group: int
    state: str = "starting"
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    newest: versions.Version | None = None
    num_restarts: int = 0
    num_worker_restarts: int = 0
    last_error: str = ""
    starting: str = ""
    silent_secs: float | None = None
    warnings: Sequence[str] = ()
    _pace: _Pace = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=20), repr=False
    )

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer records, the newest last."""
        for record in records:
            self.record.update(record)
            step, time = record.get("step"), record.get("time")
            if step is None or time is None:
                continue
            if self._pace and step < self._pace[-1][0]:
                self._pace.clear()  # The group went back to a backup.
            self._pace.append((step, time))

    @property
    def teachers(self) -> Sequence[Mapping[str, Any]]:
        """The status of each of its teachers, as its newest line has it."""
        return [_UNKNOWN_TEACHER | t for t in self.record.get("teachers", ())]

    @property
    def num_quarantined(self) -> int:
        """Versions of all its teachers that it has refused."""
        return sum(teacher["num_quarantined"] for teacher in self.teachers)

    @property
    def secs_left(self) -> float | None:
        """Seconds to the last step at the recent pace; None if unknown."""
        total = self.record.get("total_steps")
        if self.state != "running" or total is None or len(self._pace) < 2:
            return None
        (first_step, first_time), (step, time) = self._pace[0], self._pace[-1]
        if step <= first_step or time <= first_time:
            return None
        return (
            max(0.0, total - step) * (time - first_time) / (step - first_step)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment.

    Attributes:
        time: When, in Unix seconds of this machine.
        groups: What is known of each group, in order.
        last_lines: By group, when it last wrote anything, in Unix seconds.
        exchange: Where the versions were looked for.
        over: Whether nothing more is to be expected.
        exit_code: The launcher's, once it has ended; else None.
        problems: What could not be read, in words.
    """

    time: float
    groups: Sequence[GroupStatus]
    last_lines: Mapping[int, float] = dataclasses.field(default_factory=dict)
    exchange: str = ""
    over: bool = False
    exit_code: int | None = None
    problems: Sequence[str] = ()

    def age_secs(self, status: GroupStatus) -> float | None:
        """The age of a group's newest version, by its publisher's clock."""
        newest = status.newest
        if newest is None:
            return None
        return max(0.0, self.time - newest.manifest.created)
