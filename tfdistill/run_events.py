"""What happened in a run, as lines that other programs can follow.

`logs/events.jsonl` in the run's directory grows by one JSON object a line and
is never rewritten; that of an earlier run is renamed before the next begins.
Each line has

    time        Unix seconds
    monotonic   the launcher's `time.monotonic()` at the same moment
    event       what happened, see below
    group       the group's index, or null where it concerns the whole run
    task        the task's name, such as "group_0_worker_1", or null
    attempt     how often the group has been started by then, from 1

and what belongs to the event:

    start       a task runs                                       pid
    ready       a task is connected to its group
    exit        a task has ended                                  exit_code
    stopped_by_signal, continued   a task was stopped, or goes on after it
    frozen      a task was stopped for too long, and is killed    silent_secs
    stuck       a task made no progress for too long, and its group (or, of a
                group with parameter servers, it alone) is killed
                                                     silent_secs, phase
    late        tasks did not start in time                       reason
    worker_restart  a worker of a group with parameter servers will be started
                    again                                         delay_secs
    failed      the group has failed                   exit_code, reason
    restart     the group will be started again        delay_secs, restart
    done        the group is done
    stopped     the group was told to end                         reason
    end         the whole run has ended                           exit_code

Where each group has a launcher of its own, as under Slurm, each keeps its own
file, `events_group_<g>.jsonl`, and `start` stands for all of its tasks. Such a
file goes on when the group does.

`exit_code` is minus the number of the signal for a task that a signal ended.
Where `failed` names a task, it is the one to blame. `launch.json` beside
`logs` holds the process ids and attempts of the present moment.
"""

import json
import pathlib
import time
from typing import Any

NAME = "events.jsonl"


def group_path(logs_dir: pathlib.Path, group: int) -> pathlib.Path:
    """Returns the file of a group that has a launcher of its own.

    Args:
        logs_dir: The run's `logs`.
        group: Index of the group.
    """
    return logs_dir / f"events_group_{group}.jsonl"


class EventLog:
    """Appends events to a file; each line is written at once and whole."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file.

        Args:
            path: File to append to; its directory exists.
        """
        self._file = path.open("ab", buffering=0)

    def add(
        self,
        event: str,
        *,
        group: int | None = None,
        task: str | None = None,
        **details: Any,
    ) -> None:
        """Adds one event, as of now.

        Args:
            event: One of those above.
            group: Index of the group.
            task: Name of the task.
            **details: What belongs to the event.
        """
        line = {
            "time": time.time(),
            "monotonic": time.monotonic(),
            "event": event,
            "group": group,
            "task": task,
            **details,
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all events in a file so far.

    Args:
        path: File of a run, which may be in progress.
    """
    # What follows the last line break is still being written.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]
