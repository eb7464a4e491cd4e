"""A run as its files show it, when something else has started it.

The files may be half written or come from a machine that has died: what cannot
be read is reported, and never raised.
"""

import collections
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from tfdistill.status import directory
from tfdistill.status import goodput
from tfdistill.status import group as group_status
from tfdistill.status import logs
from tfdistill.status import run_events
from tfdistill.system import untrusted

# Enough for the pace and for the newest value of each log.
_METRICS_BYTES = 256 * 1024
_EVENTS_BYTES = 4 * 1024 * 1024
# A start imports TensorFlow, traces, and waits for the others.
_START_SECS = 300.0


class NoRunError(ValueError):
    """There is no run in the directory, or it cannot be looked into."""


class ObservedRun:
    """Looks at a run, as often as it is asked to."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        silent_secs: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begins to follow the files; NoRunError if there are none.

        A group that has begun to train and has not written for `silent_secs` is
        silent; one that starts has five minutes at least.
        """
        self._directory = directory.RunDirectory(workdir)
        self._silent_secs = silent_secs
        self._clock = clock
        self._problems: list[str] = []
        self._tails: dict[pathlib.Path, untrusted.Tail] = {}
        self._statuses: dict[int, group_status.GroupStatus] = {}
        # For each group, the events and marks that goodput is measured from.
        self._history = collections.defaultdict[int, list[dict[str, Any]]](list)
        self._end: list[dict[str, Any]] = []
        self._is_abandoned = False
        self._record = self._read_record()
        self._follow_events()
        if not self._groups() and self._record is None:
            raise NoRunError(
                f"{os.fspath(workdir)} contains no run (no launch.json, "
                "group_0/metrics.jsonl or logs/group_0_worker_0.log). Pass the "
                "run's workdir."
            )

    def look(self) -> group_status.RunStatus:
        """Returns how things are."""
        self._problems = []
        self._record = self._read_record()
        # Before the events: the last of them comes before the lock is free.
        self._is_abandoned = self._directory.is_abandoned(self._record)
        self._follow_events()
        now = self._clock()
        statuses = []
        for group in self._groups():
            status = self._status_of(group)
            self._follow_metrics(status)
            seen = dataclasses.replace(status)
            self._judge(seen, now)
            statuses.append(seen)
        return group_status.RunStatus(
            time=now,
            groups=statuses,
            over=bool(self._end)
            or all(status.state in run_events.ENDED for status in statuses),
            problems=self._problems,
        )

    def _read_record(self) -> dict[str, Any] | None:
        path = self._directory.path / directory.RECORD
        try:
            return directory.read_record(path)
        except (OSError, ValueError) as error:
            self._note(path, error)
            return {}

    def _groups(self) -> list[int]:
        launched = (self._record or {}).get("topology", {})
        return sorted(
            {
                *self._statuses,
                *range(launched.get("num_groups", 0)),
                *self._directory.groups(),
            }
        )

    def _status_of(self, group: int) -> group_status.GroupStatus:
        return self._statuses.setdefault(group, group_status.GroupStatus(group))

    def _new_lines(
        self, path: pathlib.Path, *, last_bytes: int
    ) -> list[dict[str, Any]]:
        """Returns what a file has gained, with its end at the first look."""
        try:
            if path not in self._tails:
                self._tails[path] = untrusted.Tail(path, last_bytes=last_bytes)
            return self._tails[path].read()
        except OSError as error:
            self._note(path, error)
            return []

    def _follow_events(self) -> None:
        for path in self._directory.events():
            for event in self._new_lines(path, last_bytes=_EVENTS_BYTES):
                group = event["group"]
                if group is not None:
                    self._status_of(group).take_event(event)
                    self._history[group].append(event)
                elif event["event"] == "end":
                    self._end = [event]

    def _follow_metrics(self, status: group_status.GroupStatus) -> None:
        path = self._directory.metrics(status.group)
        records = self._new_lines(path, last_bytes=_METRICS_BYTES)
        if records:
            # It stays in the record for good, and says how the run ended.
            status.record.pop("event", None)
        status.update(records)

    def _judge(self, status: group_status.GroupStatus, now: float) -> None:
        """Decides on the state of a group beyond its events."""
        last_sign = max(  # 0 if it has never written anything.
            status.record.get("time", 0.0),
            self._directory.last_written(status.group),
            status.last_event,
        )
        if not status.last_event and status.record.get("event") == "end":
            status.state = "done"
        silent_secs = max(0.0, now - last_sign)
        limit = max(self._silent_secs, 0.0 if status.trains else _START_SECS)
        if status.state in run_events.ENDED:
            pass
        elif self._end:
            status.state = "stopped"
        elif self._is_abandoned:
            status.state = "failed"
            status.last_error = "the launcher was killed, and its tasks with it"
        elif last_sign and silent_secs > limit:
            status.state, status.silent_secs = "silent", silent_secs
        if status.state != "done":
            self._add_log_error(status)
        self._measure(status, last_sign if status.trains else now)

    def _measure(self, status: group_status.GroupStatus, until: float) -> None:
        history = self._history[status.group]
        path = self._directory.marks(status.group)
        history += self._new_lines(path, last_bytes=_EVENTS_BYTES)
        lines = [*history, *self._end]
        status.spent = goodput.measure(lines, until=until)
        made = status.spent.good + status.spent.lost["repeated"]
        if status.state == "done" and not made:
            ended = [x["time"] for x in history if x["event"] == "ended"]
            status.finished_before = min(ended, default=None)

    def _add_log_error(self, status: group_status.GroupStatus) -> None:
        found = logs.last_error(self._directory.logs(status.group))
        if found is None:
            return
        if not status.last_error:
            status.last_error = f"{found.text} ({found.log})"
        elif found.ends_it and found.text not in status.last_error:
            status.last_error += f"; {found.log} ends with: {found.text}"

    def _note(self, path: pathlib.Path, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else error
        self._problems.append(
            untrusted.one_line(f"{path} cannot be read: {why}")
        )
