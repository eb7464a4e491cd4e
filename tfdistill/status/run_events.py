"""What happened in a run: written line by line, and what the lines show.

`logs/events.jsonl` in the run's directory grows by one JSON object a line and
is never rewritten; that of an earlier run is renamed before the next begins.
Each line has

    time        Unix seconds
    monotonic   the launcher's `time.monotonic()` at the same moment
    event       what happened, see below
    group       the group's index, or null if it concerns the whole run
    task        the task's name, such as "group_0_worker_1", or null
    attempt     how often the group has been started by then, from 1

and what belongs to the event:

    start       a task runs                                       pid, start
                `start` is "fork" or "spawn", see `--start`
    parent      the parent of the tasks has imported what it was to (`pid`,
                `ready_secs`), or can start no more of them (`pid`, `failure`)
    ready       a task is connected to its group
    starting    a group's first task has begun a part of its start: one of
                `signs.IMPORTS` and what follows there            part
    first_step  it has made its first step: seconds by part       secs
    exit        a task has ended                                  exit_code
    stopped_by_signal, continued   a task was stopped, or resumed
    frozen      a task was stopped for too long, and is killed    silent_secs
    stuck       a task made no progress for too long, and its group (or, of a
                group with parameter servers, it alone) is killed
                                                     silent_secs, phase
    late        tasks did not start in time                       reason
    worker_restart  a worker of a group with parameter servers will be started
                    again                                         delay_secs
    failed      the group has failed                   exit_code, reason
    restart     the group will be started again        delay_secs, restart
    warning     what the launcher warned of                       text
    done        the group is done
    stopped     the group was told to end                         reason
    end         the whole run has ended                           exit_code

If each group has a launcher of its own, as under Slurm, each keeps its own
file, `events_group_<g>.jsonl`, and `start` stands for all of its tasks. Such a
file is continued when the group is started again.

`exit_code` is minus the number of the signal for a task that a signal ended.
If `failed` names a task, it is the one to blame. `launch.json` beside
`logs` holds the process ids and attempts of the present moment.
"""

import dataclasses
import io
import json
import pathlib
import signal
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.system import run_files
from tfdistill.system import untrusted

NAME = "events.jsonl"


def group_path(logs_dir: pathlib.Path, group: int) -> pathlib.Path:
    """Returns the file of a group that has a launcher of its own."""
    return logs_dir / f"events_{run_files.group_name(group)}.jsonl"


class EventLog:
    """Appends events to a file; each line is written at once and whole.

    Nothing depends on these lines: what cannot be written is left out.

    Attributes:
        error: Why the last event could not be written; None if it was.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Begins in a directory that exists; the file may be there already."""
        self.error: OSError | None = None
        self._path = path
        self._file: io.FileIO | None = None
        # Whether the file may end in the middle of a line.
        self._is_torn = False
        self._write(b"")

    def add(
        self,
        event: str,
        *,
        group: int | None = None,
        task: str | None = None,
        **details: Any,
    ) -> None:
        """Adds one of the events above, as of now, with what belongs to it."""
        line = {
            "time": time.time(),
            "monotonic": time.monotonic(),
            "event": event,
            "group": group,
            "task": task,
            **details,
        }
        self._write(json.dumps(line).encode() + b"\n")

    def _write(self, text: bytes) -> None:
        try:
            if self._file is None:
                self._file = io.FileIO(self._path, "a")
            if self._is_torn:
                text = b"\n" + text
            self._is_torn = self._file.write(text) != len(text)
            self.error = None
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all events in a file so far."""
    # What follows the last line break is still being written.
    lines = path.read_bytes().split(b"\n")[:-1]
    # A full disk may have torn one.
    found = map(untrusted.json_object, lines)
    return [event for event in found if event is not None]


def describe(code: int) -> str:
    """Returns an exit code, or minus the number of a signal, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"


ENDED = ("done", "failed", "stopped")


@dataclasses.dataclass
class GroupHistory:
    """One group by its events; times are Unix seconds, 0 if not known.

    `state` is empty before the first event; `attempt` counts the starts of the
    group, and `num_worker_restarts` those of workers since the last.
    """

    state: str = ""
    since: float = 0.0
    last: float = 0.0
    attempt: int = 0
    num_restarts: int = 0
    num_worker_restarts: int = 0
    starting: str = ""
    last_error: str = ""
    warnings: list[str] = dataclasses.field(default_factory=list)


class RunHistory:
    """Follows the events of a run.

    Attributes:
        groups: What is known of each group that had an event.
        exit_code: The launcher's, once it has ended; None before.
    """

    def __init__(self) -> None:
        self.groups: dict[int, GroupHistory] = {}
        self.exit_code: int | None = None

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes in newer lines, the newest last."""
        for event in events:
            if event["event"] == "end":
                self.exit_code = event["exit_code"]
            group = event["group"]
            if group is not None:
                found = self.groups.setdefault(group, GroupHistory())
                self._take(found, event["event"], event)

    def _take(
        self, found: GroupHistory, name: str, event: Mapping[str, Any]
    ) -> None:
        before, time = found.state, event["time"]
        found.last = max(found.last, time)
        if name == "start" and (
            event["attempt"] > found.attempt or before in ENDED
        ):
            found.attempt, found.since = event["attempt"], time
            found.state, found.num_worker_restarts = "starting", 0
            found.starting = ""
        elif name == "starting":
            found.starting = event["part"]
        elif name == "first_step":
            found.starting = ""
        elif name == "ready" and found.state == "starting":
            found.state = "running"
        elif name in ENDED:
            found.state = name
        elif name == "restart":
            found.state, found.num_restarts = "restarting", event["restart"]
        elif name == "worker_restart":
            found.num_worker_restarts += 1
        elif name == "warning" and event["text"] not in found.warnings:
            found.warnings.append(event["text"])
        error = _error(name, event)
        # What ends after the group has failed, or was told to, is no error.
        if error and (name != "exit" or before in ("starting", "running")):
            found.last_error = error


def _error(name: str, event: Mapping[str, Any]) -> str:
    """Returns what went wrong in one event; empty if nothing did."""
    task = event.get("task") or "it"
    if name in ("failed", "late"):
        return event["reason"]
    if name in ("frozen", "stuck"):
        what = "was stopped" if name == "frozen" else "made no progress"
        return f"{task} {what} for {event['silent_secs']:.0f} s"
    if name == "exit" and event["exit_code"]:
        return f"{task} {describe(event['exit_code'])}"
    return ""
