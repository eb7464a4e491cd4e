"""What is known of a run and its groups, from their lines and events."""

import collections
import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.status import goodput
from tfdistill.status import run_events

_Pace = collections.deque[tuple[float, float]]


@dataclasses.dataclass
class GroupStatus:
    """What is known of one group; times are Unix seconds, 0 if not known."""

    group: int
    # `starting`, `running`, `done`, `failed`, `stopped` or `restarting`; of a
    # run's files only, also `silent`.
    state: str = "starting"
    # The newest value of every key seen in its metrics.
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_restarts: int = 0
    # Restarts of workers, since the group itself was last started.
    num_worker_restarts: int = 0
    last_error: str = ""
    silent_secs: float | None = None
    # Its launcher's warnings, each once.
    warnings: list[str] = dataclasses.field(default_factory=list)
    # When its launcher reported anything, and when its present attempt began.
    last_event: float = 0.0
    since: float = 0.0
    # When an earlier launch made its last step, if this one trained nothing.
    finished_before: float | None = None
    # What its time was spent on; nothing in a launcher, which doesn't read the
    # groups' marks.
    spent: goodput.Goodput = dataclasses.field(default_factory=goodput.Goodput)
    _attempt: int = 0
    _pace: _Pace = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=20), repr=False
    )

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer records, the newest last."""
        for record in records:
            if record.get("fit") != self.record.get("fit"):
                self.record.clear()  # Another model, or later epochs.
            self.record.update(record)
            step, time = record.get("step"), record.get("time")
            if record.get("event") == "start":
                # The first execution, which traces, ends before the next line.
                self._pace.clear()
            elif step is not None and time is not None:
                self._pace.append((step, time))
        # A script may train without having called make_strategy.
        if self.state == "starting" and self.trains:
            self.state = "running"

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Takes in an event, newer than those before; see `run_events`."""
        name, before, time = event["event"], self.state, event["time"]
        self.last_event = max(self.last_event, time)
        if name == "start" and (
            event["attempt"] > self._attempt or before in run_events.ENDED
        ):
            self._attempt, self.since = event["attempt"], time
            self.state = "starting"
            self.num_worker_restarts = 0
        elif name == "ready" and before == "starting":
            self.state = "running"
        elif name in run_events.ENDED:
            self.state = name
        elif name == "restart":
            self.state, self.num_restarts = "restarting", event["restart"]
        elif name == "worker_restart":
            self.num_worker_restarts += 1
        elif name == "warning" and event["text"] not in self.warnings:
            self.warnings.append(event["text"])
        error = _error(name, event)
        # An end after the group failed, or was stopped, isn't an error.
        if error and (name != "exit" or before in ("starting", "running")):
            self.last_error = error

    @property
    def trains(self) -> bool:
        """Whether its present attempt has written a line of metrics."""
        return self.record.get("time", 0.0) > self.since

    @property
    def has_stepped(self) -> bool:
        """Whether the present attempt is known to have made a step."""
        return self.state != "starting" and len(self._pace) > 0

    @property
    def validation(self) -> dict[str, float]:
        """The newest validation metrics by name, the loss last."""
        prefix = "val_"
        found = {
            name.removeprefix(prefix): value
            for name, value in self.record.items()
            if name.startswith(prefix) and isinstance(value, int | float)
        }
        return dict(sorted(found.items(), key=lambda item: item[0] == "loss"))

    @property
    def task_loss(self) -> float | None:
        """The newest loss without the distillation loss."""
        return self.record.get("task_loss", self.record.get("loss"))

    @property
    def teachers(self) -> Sequence[Mapping[str, Any]]:
        """The status of each of its teachers, as its newest line has it."""
        return self.record.get("teachers", ())

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


def _error(name: str, event: Mapping[str, Any]) -> str:
    """Returns what went wrong in one event; empty if nothing did."""
    task = event.get("task") or "it"
    if name in ("failed", "late"):
        return event["reason"]
    if name in ("frozen", "stuck"):
        what = "was stopped" if name == "frozen" else "made no progress"
        return f"{task} {what} for {event['silent_secs']:.0f} s"
    if name == "exit" and event["exit_code"]:
        return f"{task} {run_events.describe(event['exit_code'])}"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment."""

    time: float
    groups: Sequence[GroupStatus]
    # Whether nothing more is to be expected.
    over: bool = False
    # What could not be read.
    problems: Sequence[str] = ()
