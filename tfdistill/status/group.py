"""What is known of a run: its groups and their teachers.

Lines of metrics may come from another release, or hold anything:
what is not of the expected type is left out.
"""

import collections
import dataclasses
import re
import types
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from tfdistill.exchange import reader
from tfdistill.system import run_files
from tfdistill.system import untrusted

_MAX_TEACHERS = 1000
# What a peer may miss; of fewer batches nothing is said, because groups start
# at different times.
_MIN_BATCHES, _MAX_MISSED = 100, 0.1


class TeacherStatus(NamedTuple):
    """One teacher, as the chief of the group that learns from it sees it.

    Attributes:
        name: Such as `group_1`.
        group: Index of its group; None for a fixed SavedModel.
        step: The version in use; None without one.
        health: `absent`, `burn_in`, `good`, `fading`, `too_stale`, `worse` or
            `dropped`, and empty if it is not known.
        reason: Why it is not obeyed, or not fully; may be empty.
        share: What it counts, from 0 to 1.
        age_steps: The student's step less the version's.
        age_secs: Seconds since the group first saw the version.
        num_quarantined: Versions that were refused.
        quarantined: Reason by version, of the newest of those.
        num_answers, num_missed: Of a peer that sends predictions, batches with
            and without them; else None.
        num_forged: Messages that were refused, whoever has sent them.
        refused: The number of its refused messages by kind.
    """

    name: str
    group: int | None
    step: int | None
    health: str
    reason: str
    share: float | None
    age_steps: int | None
    age_secs: float | None
    num_quarantined: int
    quarantined: Mapping[int, str]
    num_answers: int | None = None
    num_missed: int | None = None
    num_forged: int | None = None
    refused: Mapping[str, int] = types.MappingProxyType({})

    @property
    def num_asked(self) -> int:
        """Batches for which a peer's predictions were wanted."""
        return (self.num_answers or 0) + (self.num_missed or 0)

    @property
    def misses_many(self) -> bool:
        """Whether it sends predictions for too few of the batches."""
        return (
            self.num_asked >= _MIN_BATCHES
            and (self.num_missed or 0) > _MAX_MISSED * self.num_asked
        )


def of_record(record: Mapping[str, Any]) -> list[TeacherStatus]:
    """Returns the teachers in a line of a group's metrics."""
    found = record.get("teachers")
    if not isinstance(found, list):
        return []
    return [
        _of_entry(entry)
        for entry in found[:_MAX_TEACHERS]
        if isinstance(entry, Mapping)
    ]


def _of_entry(entry: Mapping[str, Any]) -> TeacherStatus:
    name = untrusted.one_line(entry.get("name", "?"), max_chars=80)
    step = _count(entry.get("step"))
    quarantined = _quarantined(entry.get("quarantined"))
    num_quarantined = _count(entry.get("num_quarantined"))
    return TeacherStatus(
        name=name,
        group=run_files.group_of(name),
        step=step,
        health=_text(entry.get("health")),
        reason=_text(entry.get("reason")),
        share=untrusted.number(entry.get("share")),
        age_steps=untrusted.whole(entry.get("age_steps")),
        age_secs=untrusted.number(entry.get("age_secs")),
        num_quarantined=(
            len(quarantined) if num_quarantined is None else num_quarantined
        ),
        quarantined=quarantined,
        num_answers=_count(entry.get("num_answers")),
        num_missed=_count(entry.get("num_missed")),
        num_forged=_count(entry.get("num_forged")),
        refused=_refused(entry.get("refused")),
    )


def _quarantined(found: Any) -> dict[int, str]:
    if not isinstance(found, Mapping):
        return {}
    return {
        int(step): untrusted.one_line(reason)
        for step, reason in list(found.items())[:100]
        if isinstance(step, str) and re.fullmatch("[0-9]{1,19}", step)
    }


def _refused(found: Any) -> dict[str, int]:
    if not isinstance(found, Mapping):
        return {}
    return {
        untrusted.one_line(kind, max_chars=20): count
        for kind, number in list(found.items())[:100]
        if (count := _count(number))
    }


def _count(value: Any) -> int | None:
    found = untrusted.whole(value)
    return found if found is not None and found >= 0 else None


def _text(value: Any) -> str:
    return untrusted.one_line(value) if isinstance(value, str) else ""


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
        warnings: Of its tasks and of its launcher, each once.
    """

    group: int
    state: str = "starting"
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    newest: reader.Published | None = None
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
            step = untrusted.number(record.get("step"))
            time = untrusted.number(record.get("time"))
            if step is None or time is None:
                continue
            if self._pace and step < self._pace[-1][0]:
                self._pace.clear()  # The group went back to a backup.
            self._pace.append((step, time))

    def number(self, key: str) -> float | None:
        """Returns a finite number of the record; None if there is none."""
        return untrusted.number(self.record.get(key))

    @property
    def teachers(self) -> list[TeacherStatus]:
        """Its teachers, by the newest line that names any."""
        return of_record(self.record)

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

    def age_secs(self, version: reader.Published) -> float:
        """Returns a version's age, by the storage's clock if it has one."""
        return max(0.0, self.time - (version.modified or version.created))
