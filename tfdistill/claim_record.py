"""Who claims a group: what is written down of a process, and is it alive?

A record comes from another process, often from another machine, so it is read
as hostile input.
"""

import dataclasses
import json
import os
import re
import socket
from typing import Any

from tfdistill import process_status

MAX_BYTES = 4096
_INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[!-~]{0,255}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A process that claims a group, and how often it has said so.

    Attributes:
      incarnation: Identifies one run of the publishing process.
      host: Name of its machine, for people.
      pid: Its process id there.
      machine: One boot of one machine, and the namespace that `pid` counts
        in; empty where the system does not tell.
      started: When the process started, in the units of that machine.
      counter: Grows for as long as the process lives.
      released: Whether the process has finished with the group.
    """

    incarnation: str
    host: str
    pid: int
    machine: str
    started: int
    counter: int = 0
    released: bool = False

    @classmethod
    def of_this_process(cls, incarnation: str) -> "ClaimRecord":
        """Returns this process' record, as it claims a group."""
        pid = os.getpid()
        name = re.sub(r"[^!-~]", "?", socket.gethostname())[:255]
        return cls(
            incarnation=incarnation,
            host=name,
            pid=pid,
            machine=process_status.machine(),
            started=process_status.started(pid),
        )

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(vars(self), sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> "ClaimRecord | None":
        """Reads a record, or returns None for what is none.

        Args:
          text: What `to_json` returned, as UTF-8. It may be torn: some storage
            shows a file while it is written.
        """
        try:
            fields = json.loads(text)
            record = cls(**fields) if isinstance(fields, dict) else None
        except (ValueError, TypeError, RecursionError):
            return None
        return record if record is not None and record._is_valid() else None

    def is_gone(self) -> bool:
        """Whether the process is known to live no more.

        True for this process itself: what it claimed earlier, in a training
        that was interrupted, does not stand in its own way. Nothing is known
        of processes of other machines.
        """
        if self.released:
            return True
        if not self.machine or self.machine != process_status.machine():
            return False
        return self.pid == os.getpid() or process_status.has_ended(
            self.pid, started=self.started
        )

    def __str__(self) -> str:
        """Names the process for people."""
        return (
            f"process {self.pid} on host {self.host!r} (incarnation "
            f"{self.incarnation})"
        )

    def _is_valid(self) -> bool:
        return (
            _matches(_INCARNATION, self.incarnation)
            and _matches(_NAME, self.host)
            and _matches(_NAME, self.machine)
            and _is_count(self.started)
            and _is_count(self.counter)
            and _is_count(self.pid)
            # 0 and below stand for groups of processes.
            and 0 < self.pid < 2**31
            and type(self.released) is bool
        )


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
