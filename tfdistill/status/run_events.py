"""What happened in a run: written line by line, and what the lines show.

`logs/events.jsonl` in the run's directory grows by one JSON object a line and
is never rewritten; an earlier run's file is renamed before the next run begins.
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
    parent      the parent of the tasks can start no more     pid, failure
    ready       a task is connected to its group
    exit        a task has ended                                  exit_code
    frozen      a signal has stopped a task for too long; it is killed
                                                                  silent_secs
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
    stopped     the group was stopped                             reason
    end         the whole run has ended                           exit_code

If each group has its own launcher, as under Slurm, each group has its own file,
`events_group_<g>.jsonl`, and `start` stands for all of its tasks. Such a file
is continued when the group is started again.

`exit_code` is minus the number of the signal for a task that a signal ended.
If `failed` names a task, this task caused the failure.
"""

import contextlib
import pathlib
import signal
import sys
import time
from typing import Any

from tfdistill.system import run_files
from tfdistill.system import untrusted

NAME = "events.jsonl"
# The last event of a group, which is its state from then on.
ENDED = ("done", "failed", "stopped")


def group_path(logs_dir: pathlib.Path, group: int) -> pathlib.Path:
    """Returns the file of a group that has its own launcher."""
    return logs_dir / f"events_{run_files.group_name(group)}.jsonl"


class EventLog(run_files.LineFile):
    """Appends events to a file of a directory that exists."""

    def add(
        self,
        event: str,
        *,
        group: int | None = None,
        task: str | None = None,
        **details: object,
    ) -> dict[str, Any]:
        """Adds one of the events above, as of now, with what belongs to it."""
        added = {
            "time": time.time(),
            "monotonic": time.monotonic(),
            "event": event,
            "group": group,
            "task": task,
            **details,
        }
        self.append(added)
        return added


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all events in a file so far; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return untrusted.Tail(path, last_bytes=sys.maxsize).read()
    return []


def describe(code: int) -> str:
    """Returns an exit code, or minus the number of a signal, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"
