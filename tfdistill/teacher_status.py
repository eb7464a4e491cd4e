"""What a group's metrics tell of its teachers.

The lines may come from another release, or from nobody who means well: what
is not of the expected type counts as not said.
"""

import re
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from tfdistill import json_values
from tfdistill import plain_text

_GROUP = re.compile(r"group_(0|[1-9][0-9]{0,8})")
_MAX_TEACHERS = 1000


class TeacherStatus(NamedTuple):
    """One teacher, as the chief of the group that learns from it sees it.

    Attributes:
        name: Such as `group_1`.
        group: Index of its group; None for a fixed SavedModel.
        step: The version in use; None without one.
        health: `absent`, `good`, `fading`, `too_stale` or `dropped`, and empty
            where it is not told.
        reason: Why it is not obeyed, or not fully; may be empty.
        share: What it counts, from 0 to 1.
        age_steps: The student's step less the version's.
        age_secs: Seconds since the group first saw the version.
        num_quarantined: Versions that were refused.
        quarantined: Reason by version, of the newest of those.
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


def of_record(record: Mapping[str, Any]) -> list[TeacherStatus]:
    """Returns the teachers in a line of a group's metrics.

    Args:
        record: What `RunLog` has written.
    """
    found = record.get("teachers")
    if not isinstance(found, list):
        return []
    return [
        _of_entry(entry)
        for entry in found[:_MAX_TEACHERS]
        if isinstance(entry, Mapping)
    ]


def _of_entry(entry: Mapping[str, Any]) -> TeacherStatus:
    name = plain_text.one_line(entry.get("name", "?"), max_chars=80)
    group = _GROUP.fullmatch(name)
    step = _count(entry.get("step"))
    quarantined = _quarantined(entry.get("quarantined"))
    told = _count(entry.get("num_quarantined"))
    return TeacherStatus(
        name=name,
        group=int(group[1]) if group else None,
        step=step,
        health=_text(entry.get("health")),
        reason=_text(entry.get("reason")),
        share=json_values.number(entry.get("share")),
        age_steps=json_values.whole(entry.get("age_steps")),
        age_secs=json_values.number(entry.get("age_secs")),
        num_quarantined=len(quarantined) if told is None else told,
        quarantined=quarantined,
    )


def _quarantined(found: Any) -> dict[int, str]:
    if not isinstance(found, Mapping):
        return {}
    return {
        int(step): plain_text.one_line(reason)
        for step, reason in list(found.items())[:100]
        if isinstance(step, str) and re.fullmatch("[0-9]{1,19}", step)
    }


def _count(value: Any) -> int | None:
    found = json_values.whole(value)
    return found if found is not None and found >= 0 else None


def _text(value: Any) -> str:
    return plain_text.one_line(value) if isinstance(value, str) else ""
