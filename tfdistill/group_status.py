"""What is known of one group while its run goes on."""

import collections
import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill import json_values
from tfdistill import published
from tfdistill import teacher_status

_Pace = collections.deque[tuple[float, float]]


@dataclasses.dataclass
class GroupStatus:
    """What is known of one group.

    Attributes:
        group: Index of the group.
        state: `starting`, `running`, `stopping`, `done`, `failed`, `stopped`,
            `restarting` or, for who only sees the files of a run, `silent`.
        record: The newest value of every key seen in the group's metrics.
        newest: Its newest version in the exchange; None if none is known.
        num_restarts: How often it was started again as a whole.
        num_worker_restarts: How often workers of it were started again, since
            it was last started itself.
        last_error: Why it, or a task of it, last failed; empty if none did.
        silent_secs: Of a group in the state `silent`: since when.
    """

    group: int
    state: str = "starting"
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    newest: published.Published | None = None
    num_restarts: int = 0
    num_worker_restarts: int = 0
    last_error: str = ""
    silent_secs: float | None = None
    _pace: _Pace = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=20), repr=False
    )

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer records, the newest last."""
        for record in records:
            self.record.update(record)
            step = json_values.number(record.get("step"))
            time = json_values.number(record.get("time"))
            if step is None or time is None:
                continue
            if self._pace and step < self._pace[-1][0]:
                self._pace.clear()  # The group went back to a backup.
            self._pace.append((step, time))

    def number(self, key: str) -> float | None:
        """Returns a finite number of the record; None where there is none.

        Args:
            key: Of the metrics.
        """
        return json_values.number(self.record.get(key))

    @property
    def teachers(self) -> list[teacher_status.TeacherStatus]:
        """Its teachers, by the newest line that names any."""
        return teacher_status.of_record(self.record)

    @property
    def num_quarantined(self) -> int:
        """Versions of all its teachers that it has refused."""
        return sum(teacher.num_quarantined for teacher in self.teachers)

    @property
    def secs_left(self) -> float | None:
        """Seconds to the last step at the recent pace; None if unknown."""
        total = self.number("total_steps")
        if total is None or len(self._pace) < 2:
            return None
        (first_step, first_time), (step, time) = self._pace[0], self._pace[-1]
        if step <= first_step or time <= first_time:
            return None
        return (
            max(0.0, total - step) * (time - first_time) / (step - first_step)
        )
