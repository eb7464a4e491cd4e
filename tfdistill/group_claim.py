"""The claim of a group: one process at a time publishes for it.

The holder counts up in its claim about once a second. A second process that
wants the group watches: while the count moves it fails, and once it has stood
still for the lease it takes the claim over. A holder that was frozen meanwhile
finds the other's claim, and never publishes again. Time is each process' own,
so clocks that differ do not matter; docs/protocol.md has the rules.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from tfdistill import claim_files
from tfdistill import claim_record
from tfdistill import filesystem

LEASE_SECS = 10.0
RENEW_SECS = 1.0

# The last count of a process that has just died may still come into sight.
_MOVES_OF_THE_LIVING = 2
_LOOKS_A_RENEWAL = 4
_RELEASE_SECS = 10.0
_log = logging.getLogger(__name__)


class GroupClaimedError(ValueError):
    """Another process publishes for the group, and is alive."""


class ClaimLostError(RuntimeError):
    """Another process has taken the group over: stop publishing for good."""


ERRORS = (GroupClaimedError, ClaimLostError)


class GroupClaim:
    """This process' claim of one group. Threads may share it."""

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        group_dir: str,
        *,
        owner: claim_record.ClaimRecord,
        lease_secs: float = LEASE_SECS,
        renew_secs: float = RENEW_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage.

        Args:
          file_system: Where the group's directory is.
          group_dir: The directory; it need not exist.
          owner: Who claims the group.
          lease_secs: Seconds without a sign of life after which another
            process' claim is taken over. Default 10.
          renew_secs: Seconds between two signs of life. Default 1.
          clock: Seconds of a clock that never goes backwards. Default:
            `time.monotonic`.
        """
        if not 0 < 3 * renew_secs <= lease_secs:
            raise ValueError(
                "`renew_secs` must be > 0, and `lease_secs` three times as "
                f"long or longer; received {renew_secs!r} and {lease_secs!r}."
            )
        self._group_dir = group_dir
        self._files = claim_files.ClaimFiles(file_system, group_dir)
        self._owner = owner
        self._lease_secs = lease_secs
        self._renew_secs = renew_secs
        self._clock = clock
        self._number = 0
        self._failure: GroupClaimedError | ClaimLostError | None = None
        self._out_of_reach = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="tfdistill-claim", daemon=True
        )

    def __enter__(self) -> "GroupClaim":
        return self

    def __exit__(self, *args: object) -> None:
        self.release()

    @property
    def is_released(self) -> bool:
        """Whether the group was given up, and not lost before."""
        return self._stopping.is_set() and self._failure is None

    @property
    def is_active(self) -> bool:
        """Whether the claim is held, or still being tried for."""
        return self._failure is None and not self._stopping.is_set()

    @property
    def is_held(self) -> bool:
        """Whether the claim was taken, and is not known to be lost."""
        return self._number > 0 and self.is_active

    def start(self) -> None:
        """Takes the claim and renews it in the background.

        Returns at once where the group is free or its last owner is known to
        be dead, and after the lease where that cannot be known. While the
        storage is out of reach it returns too, and goes on trying in the
        background; nothing can be published before that succeeds.

        Raises:
          GroupClaimedError: If another process has the group, and is alive.
        """
        try:
            self._acquire()
        except OSError as error:
            self._tell_outage(error)
        self._thread.start()

    def check(self) -> None:
        """Raises what the background has found out; touches no storage.

        Raises:
          GroupClaimedError: If another process had the group before.
          ClaimLostError: If another process has taken it over.
        """
        if self._failure is not None:
            raise self._failure

    def confirm(self) -> None:
        """Makes sure, by looking, that the group is still this process'.

        Raises:
          GroupClaimedError: If another process had the group before.
          ClaimLostError: If another process has taken it over.
          RuntimeError: If the claim could not be taken yet.
          OSError: If the storage fails.
        """
        self.check()
        if not self._number:
            raise RuntimeError(
                f"{self._group_dir} could not be claimed yet, since its "
                "storage fails; nothing is published before that."
            )
        try:
            self._refuse_other()
        except ClaimLostError as error:
            self._failure = error
            _log.error("%s", error)
            raise

    def release(self) -> None:
        """Gives the group up, for others to claim at once.

        Waits 10 s at most for storage that does not answer.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_RELEASE_SECS)

    def _run(self) -> None:
        while not self._stopping.wait(self._renew_secs):
            try:
                if self._number:
                    self._renew()
                else:
                    self._acquire()
            except OSError as error:
                self._tell_outage(error)
            except ERRORS as error:
                self._failure = error
                _log.error("%s", error)
                return
            else:
                self._out_of_reach = False
        # Where this fails the owner's death, or the lease, says the same.
        with contextlib.suppress(OSError, ClaimLostError):
            if self._number:
                self._owner = dataclasses.replace(self._owner, released=True)
                self._renew()

    def _renew(self) -> None:
        self._refuse_other()
        self._owner = dataclasses.replace(
            self._owner, counter=self._owner.counter + 1
        )
        self._files.write(self._number, self._owner)

    def _refuse_other(self) -> None:
        # A file is opened rather than listed: some storage lists directories
        # as they were a while ago.
        number, other = self._number, None
        own = self._files.read(number)
        if own is None:
            newest = self._files.newest()
            if newest is not None and newest.number > number:
                other = newest
        elif own.record and own.record.incarnation != self._incarnation:
            other = own
        else:
            other = self._files.read(number + 1)
        if other is not None:
            raise ClaimLostError(
                f"{self._group_dir} was taken over by "
                f"{other.record or 'another process'}: this process, "
                f"{self._owner.pid} on host {self._owner.host!r}, gave no sign "
                f"of life for the lease of {self._lease_secs:.0f} s. It was "
                "frozen, or the storage was out of reach. It will not publish "
                "any more; end it. If two groups were started with one index, "
                "give each its own (TFDISTILL_GROUP)."
            )

    def _acquire(self) -> None:
        watch = claim_files.Watch()
        poll_secs = self._renew_secs / _LOOKS_A_RENEWAL
        while not self._stopping.is_set():
            # Before the look: this process may be frozen right after it.
            now = self._clock()
            newest = self._files.newest()
            if newest is None:
                taken = self._take(0)
            elif self._may_follow(newest, watch, now):
                taken = self._take(newest.number)
            else:
                taken = False
            if taken:
                return
            self._stopping.wait(poll_secs)

    def _may_follow(
        self, newest: claim_files.Claim, watch: claim_files.Watch, now: float
    ) -> bool:
        record = newest.record
        if record is not None and (
            record.is_gone() or record.incarnation == self._incarnation
        ):
            return True
        watch.see(newest, self._clock())
        if watch.num_moves >= _MOVES_OF_THE_LIVING:
            raise GroupClaimedError(
                f"{self._group_dir} must have one publisher; "
                f"{record or 'another process'} claims it and is alive. Give "
                "each group an index of its own (TFDISTILL_GROUP) and each run "
                "an exchange of its own, or end that process first."
            )
        if now - watch.since < self._lease_secs:
            return False
        _log.warning(
            "Taking over %s: %s has given no sign of life for %.0f s.",
            self._group_dir,
            record or "its owner",
            self._lease_secs,
        )
        return True

    def _take(self, before: int) -> bool:
        if not self._files.create(before + 1, self._owner):
            return False
        if not self._files.creates_exclusively:
            self._stopping.wait(2 * self._renew_secs)
            found = self._files.read(before + 1)
            if found is None or found.text != self._owner.to_json().encode():
                return False
        self._number = before + 1
        if before:
            # In the file that the owner before reads, should it wake up.
            with contextlib.suppress(OSError):
                self._files.write(before, self._owner)
                self._files.remove_below(before)
        return True

    @property
    def _incarnation(self) -> str:
        return self._owner.incarnation

    def _tell_outage(self, error: OSError) -> None:
        level = logging.DEBUG if self._out_of_reach else logging.WARNING
        self._out_of_reach = True
        _log.log(
            level, "Cannot claim %s, trying on: %s", self._group_dir, error
        )
