"""How one group of a run ended."""

import dataclasses
import signal
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How one group ended.

    Attributes:
        group: Index of the group.
        state: `"done"`, `"failed"` or, if it was told to end, `"stopped"`.
        exit_codes: Exit code of each task by name; minus the signal's number
            for a task that a signal ended.
        failed_task: Name of the task that failed first, to which the failure
            of its peers is due; None if none failed by itself.
        reason: What happened, in words; empty for a group that is done.
        last_lines: The last lines of the failed task's log.
        restarts: How often each worker was started again, by name, since the
            group was last started; of a group with parameter servers only.
        group_restarts: How often the whole group was started again.
    """

    group: int
    state: str
    exit_codes: Mapping[str, int | None]
    failed_task: str | None
    reason: str
    last_lines: tuple[str, ...]
    restarts: Mapping[str, int]
    group_restarts: int = 0


def describe(code: int) -> str:
    """Returns an exit code in words.

    Args:
        code: Minus the signal's number for a task that a signal ended.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"
