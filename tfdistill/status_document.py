"""A run's status as one JSON document, for scripts.

Keys stay as they are within one `format`; docs/operations.md lists them. What
is not known is null.
"""

from typing import Any

from tfdistill import group_status
from tfdistill import observed_run
from tfdistill import teacher_status

FORMAT = 1
# Logs of `fit` that have a key of their own.
_NUMBERS = {
    "loss": "loss",
    "task_loss": "task_loss",
    "distillation_loss": "distillation_loss",
    "distillation_weight": "distillation_weight",
    "examples_per_second": "examples_per_second",
}


def document(workdir: str, seen: observed_run.Observation) -> dict[str, Any]:
    """Returns the document.

    Args:
        workdir: Directory of the run.
        seen: The run.
    """
    return {
        "format": FORMAT,
        "workdir": workdir,
        "time": seen.time,
        "over": seen.over,
        "exit_code": seen.exit_code,
        "exchange": seen.exchange,
        "problems": seen.problems,
        "groups": [_group(status, seen) for status in seen.groups],
    }


def _group(
    status: group_status.GroupStatus, seen: observed_run.Observation
) -> dict[str, Any]:
    last = seen.last_lines.get(status.group, 0.0)
    return {
        "group": status.group,
        "state": status.state,
        "silent_secs": status.silent_secs,
        "last_sign_secs": max(0.0, seen.time - last) if last else None,
        "step": _whole(status.number("step")),
        "total_steps": _whole(status.number("total_steps")),
        "secs_left": status.secs_left if status.state == "running" else None,
        **{key: status.number(name) for key, name in _NUMBERS.items()},
        "newest_version": _newest(status, seen.time),
        "teachers": [_teacher(teacher) for teacher in status.teachers],
        "num_quarantined": status.num_quarantined,
        "restarts": status.num_restarts,
        "worker_restarts": status.num_worker_restarts,
        "last_error": status.last_error or None,
    }


def _newest(
    status: group_status.GroupStatus, now: float
) -> dict[str, Any] | None:
    found = status.newest
    if found is None:
        return None
    return {
        "step": found.step,
        "bytes": found.num_bytes,
        "age_secs": max(0.0, now - (found.modified or found.created)),
        "broken": list(found.broken),
    }


def _teacher(found: teacher_status.TeacherStatus) -> dict[str, Any]:
    return {
        **found._asdict(),
        "quarantined": [
            {"step": step, "reason": reason}
            for step, reason in sorted(found.quarantined.items())
        ],
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
