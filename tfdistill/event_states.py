"""What a launcher's events tell of each group's state."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill import group_result
from tfdistill import json_values
from tfdistill import plain_text

ENDED = ("done", "failed", "stopped")


@dataclasses.dataclass
class EventState:
    """One group by its events.

    Attributes:
        state: `starting`, `running`, `done`, `failed`, `stopped` or
            `restarting`; empty before the first event.
        since: When it last started, in Unix seconds; 0 if not known.
        last: Time of its last event.
        attempt: How often it has been started, from 1.
        num_restarts: How often it was started again, or will be.
        num_worker_restarts: Of workers, since it was last started.
        last_error: Why it, or a task of it, last failed; empty if none did.
        last_error_time: When; 0 if none did.
    """

    state: str = ""
    since: float = 0.0
    last: float = 0.0
    attempt: int = 0
    num_restarts: int = 0
    num_worker_restarts: int = 0
    last_error: str = ""
    last_error_time: float = 0.0


class EventStates:
    """Follows the events of a run.

    Attributes:
        groups: What is known of each group that had an event.
        exit_code: The launcher's, once it has ended; None before.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self.groups: dict[int, EventState] = {}
        self.exit_code: int | None = None

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer events, the newest last.

        Args:
            events: Lines of events.jsonl; what is not one is left out.
        """
        for event in events:
            name = event.get("event")
            group = json_values.whole(event.get("group"))
            if name == "end":
                self.exit_code = json_values.whole(event.get("exit_code"))
            if (
                isinstance(name, str)
                and group is not None
                and 0 <= group < 10**6
            ):
                self._take(
                    self.groups.setdefault(group, EventState()), name, event
                )

    def _take(
        self, found: EventState, name: str, event: Mapping[str, Any]
    ) -> None:
        before = found.state
        time = json_values.number(event.get("time")) or 0.0
        attempt = json_values.whole(event.get("attempt")) or 0
        found.last = max(found.last, time)
        if name == "start" and (attempt > found.attempt or before in ENDED):
            found.attempt, found.since = attempt, time
            found.state, found.num_worker_restarts = "starting", 0
        elif name == "ready" and found.state == "starting":
            found.state = "running"
        elif name in ENDED:
            found.state = name
        elif name == "restart":
            found.state = "restarting"
            restart = json_values.whole(event.get("restart"))
            found.num_restarts = restart or found.num_restarts
        elif name == "worker_restart":
            found.num_worker_restarts += 1
        error = _error(name, event)
        # What ends after the group has failed, or was told to, is no error.
        if error and (name != "exit" or before in ("starting", "running")):
            found.last_error, found.last_error_time = error, time


def _error(name: str, event: Mapping[str, Any]) -> str:
    """Returns what went wrong in one event; empty if nothing did."""
    task = plain_text.one_line(event.get("task") or "", max_chars=80)
    if name in ("failed", "late"):
        return plain_text.one_line(event.get("reason") or name)
    if name in ("frozen", "stuck"):
        secs = json_values.number(event.get("silent_secs")) or 0.0
        what = "was stopped" if name == "frozen" else "made no progress"
        return f"{task or 'it'} {what} for {secs:.0f} s"
    code = json_values.whole(event.get("exit_code"))
    if name == "exit" and code:
        return f"{task} {group_result.describe(code)}"
    return ""
