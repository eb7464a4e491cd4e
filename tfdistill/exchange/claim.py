"""Which process publishes for a group: the one that its `owner.json` names.

A process that claims a group puts its name there. A newer process of the same
run, which was started in place of one that has failed or hangs, does so at
once. The older one reads the file right before each of its versions would come
into sight, and ends. A process of another run is refused.
"""

import contextlib
import logging
import os
import socket
from typing import Any

from tfdistill.exchange import notes
from tfdistill.system import untrusted

_NAME = "owner"
_log = logging.getLogger(__name__)


class GroupClaimedError(ValueError):
    """The group belongs to another run."""


class ClaimLostError(RuntimeError):
    """Another process has taken the group over: stop publishing for good."""


ERRORS = (GroupClaimedError, ClaimLostError)


class GroupClaim:
    """This process's claim of one group. Threads may share it."""

    def __init__(
        self, files: notes.Notes, *, run: str, incarnation: str
    ) -> None:
        """Takes the group, from an earlier process of this run if need be.

        `run` is equal for all attempts of one run. If the storage can't be
        reached, `confirm` tries again.
        """
        self._files = files
        self._own = {
            "run": run,
            "incarnation": incarnation,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._is_taken = self._is_released = False
        self._failure: GroupClaimedError | ClaimLostError | None = None
        try:
            self.confirm()
        except OSError as error:
            _log.warning("Cannot write %s yet: %s", files.path(_NAME), error)

    def __enter__(self) -> "GroupClaim":
        return self

    def __exit__(self, *args: object) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        """Whether the group was taken, and neither given up nor lost since."""
        lost = self._failure is not None
        return self._is_taken and not lost and not self._is_released

    def check(self) -> None:
        """Raises what `confirm` has found out; touches no storage."""
        if self._failure is not None:
            raise self._failure

    def confirm(self) -> None:
        """Makes sure, by looking, that the group is this process' to use.

        Once it is released, nothing is left to make sure of.
        """
        self.check()
        if self._is_released:
            return
        found = self._files.read(_NAME)
        if not self._is_taken:
            self._refuse_other_run(found)
        elif found and not self._is_own(found):
            self._failure = ClaimLostError(
                f"{_named(found)} has taken over {self._files.directory}: "
                f"{_named(self._own)} publishes nothing more; stop it. If two "
                "groups were started with the same index, give each its own "
                "(TFDISTILL_GROUP)."
            )
        self.check()
        if not found or not self._is_taken:
            if self._is_taken:
                _log.warning(
                    "%s was deleted, perhaps with versions next to it. "
                    "Training continues and publishes there again. Don't "
                    "change an exchange that is in use.",
                    self._files.path(_NAME),
                )
            self._files.write(_NAME, self._own)
            self._is_taken = True

    def release(self) -> None:
        """Gives the group up, for any run to claim."""
        if self.is_held:
            # If this fails, only another run is affected.
            with contextlib.suppress(OSError):
                if self._is_own(self._files.read(_NAME) or {}):
                    self._files.remove(_NAME)
        self._is_released = True

    def _refuse_other_run(self, found: dict[str, Any] | None) -> None:
        if found is None or found.get("run") == self._own["run"]:
            return
        path = self._files.path(_NAME)
        owner = _named(found) if found else "an unknown owner"
        self._failure = GroupClaimedError(
            f"{self._files.directory} belongs to another run: {path} names "
            f"{owner}; this is {_named(self._own)}. Give each run its own "
            "exchange (TFDISTILL_EXCHANGE). If that run is over, remove "
            f"{path}; to resume it, set TFDISTILL_WORKDIR to the run's "
            "directory."
        )

    def _is_own(self, found: dict[str, Any]) -> bool:
        return found.get("incarnation") == self._own["incarnation"]


def _named(owner: dict[str, Any]) -> str:
    """Names a process for people, whatever was written of it."""
    run, host, pid = (owner.get(name) for name in ("run", "host", "pid"))
    return untrusted.one_line(f"process {pid} on host {host!r} of run {run!r}")
