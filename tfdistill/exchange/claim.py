"""The claim of a group: one process at a time publishes for it.

The holder increases a count in its claim about once a second. A second process
that wants the group reads it: while the count grows, that process fails; once
the count has not changed for the lease, that process takes the claim over. A
holder that was frozen meanwhile finds the other's claim, and never publishes
again. Each process measures time by its own clock, so clocks that differ do not
matter; docs/protocol.md has the rules.

Claims are numbered. `<group>/.claim-<n>/owner.json` holds the n-th, and the
highest number counts. To follow the n-th claim is to make the n+1-th. If
directories are renamed as a whole, only one process can: a directory that holds
a claim already blocks the rename. An object store refuses a second file of one
name. Otherwise the last one to write has it, and the others find out by reading
it again; so does who claims in a store, as some ignore the condition.

A record comes from another process, often from another machine, so it is read
as hostile input. In a run with a key both the name of a claim and what it says
are signed with it; others say nothing to this run, whoever wrote them.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from tfdistill.exchange import filesystem
from tfdistill.exchange import signing
from tfdistill.system import processes
from tfdistill.system import untrusted

MAX_BYTES = 4096
LEASE_SECS = 10.0
RENEW_SECS = 1.0
_INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NAME = re.compile(r"[!-~]{0,255}")
_FILE_NAME = re.compile(r"\.claim-([1-9][0-9]{0,17})(-[0-9a-f]{32})?")
# More than a group is ever started; no claim is followed to no end.
_MAX_NUMBER = 10_000_000
_FILE = "owner.json"
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
# The last count of a process that has just died may still come into sight.
_MOVES_OF_THE_LIVING = 2
_LOOKS_A_RENEWAL = 4
_RELEASE_SECS = 10.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A process that claims a group, and how often it has said so.

    Attributes:
      incarnation: Identifies one run of the publishing process.
      host: Name of its machine, for people.
      pid: Its process id there.
      machine: One boot of one machine, and the namespace that `pid` counts
        in; empty if the system does not say.
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
        """Returns this process's record, as it claims a group."""
        pid = os.getpid()
        name = re.sub(r"[^!-~]", "?", socket.gethostname())[:255]
        return cls(
            incarnation=incarnation,
            host=name,
            pid=pid,
            machine=processes.machine(),
            started=processes.started(pid),
        )

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(vars(self), sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> "ClaimRecord | None":
        """Reads a record; None for what is none, such as a torn file."""
        try:
            record = cls(**(untrusted.json_object(text) or {}))
        except TypeError:
            return None
        return record if record._is_valid() else None

    def is_gone(self) -> bool:
        """Whether the process is known to live no more.

        True for this process itself: what it claimed earlier, in a training
        that was interrupted, does not stand in its own way. Nothing is known
        of processes of other machines.
        """
        if self.released:
            return True
        if not self.machine or self.machine != processes.machine():
            return False
        return self.pid == os.getpid() or processes.has_ended(
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
            and _matches(_HOST_NAME, self.host)
            and _matches(_HOST_NAME, self.machine)
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


class Claim(NamedTuple):
    """What was read of a claim; its record is None if the text is none."""

    number: int
    text: bytes
    record: ClaimRecord | None


class ClaimFiles:
    """Reads and writes the claims of one group; failures are OSErrors."""

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        group_dir: str,
        *,
        signer: signing.Signer | None = None,
    ) -> None:
        self._file_system = file_system
        self._group_dir = group_dir
        self._signer = signer
        self._has_warned = False
        # Whether only one process can make a claim: until a rename is refused,
        # as some mounts do.
        self.creates_exclusively = file_system.renames_atomically

    def newest(self) -> Claim | None:
        """Returns the claim that counts, or None."""
        number = max(self._numbers(), default=None)
        if number is None:
            return None
        # What is listed and cannot be read is being written, or removed.
        return self.read(number) or Claim(number, b"", None)

    def read(self, number: int) -> Claim | None:
        """Returns a claim, or None if it is not there."""
        path = f"{self._path(number)}/{_FILE}"
        try:
            text = filesystem.read(self._file_system, path, max_bytes=MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self._claim(number, text)

    def create(self, number: int, record: ClaimRecord) -> bool:
        """Makes a claim, unless another process was faster; whether it did.

        Unless `creates_exclusively`, True says only that no other process was
        seen: `read` the claim again after a while.
        """
        path = self._path(number)
        draft = f"{self._group_dir}/.tmp-claim-{record.incarnation}"
        if self._file_system.renames_atomically:
            self._file_system.remove_tree(draft)
            text = self._text(number, record)
            self._file_system.write(f"{draft}/{_FILE}", [text])
            try:
                if filesystem.move(self._file_system, draft, path):
                    return True
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                return False
            finally:
                self._file_system.remove_tree(draft)
            self.creates_exclusively = False
        try:
            text = self._text(number, record)
            self._file_system.create(f"{path}/{_FILE}", text)
        except FileExistsError:
            return False
        return True

    def write(self, number: int, record: ClaimRecord) -> None:
        """Replaces what a claim says."""
        text = self._text(number, record)
        self._file_system.write(f"{self._path(number)}/{_FILE}", [text])

    def remove_below(self, number: int) -> None:
        """Removes all claims that come before this one."""
        for found in self._numbers():
            if found < number:
                self._file_system.remove_tree(self._path(found))

    def _numbers(self) -> list[int]:
        try:
            names = self._file_system.list_dir(self._group_dir)
        except FileNotFoundError:
            return []
        numbers, others = [], []
        for name in names:
            if match := _FILE_NAME.fullmatch(name):
                number = int(match[1])
                ours = number <= _MAX_NUMBER and name == self._name(number)
                numbers.append(number) if ours else others.append(name)
        if others:
            self._warn(
                f"{len(others)} claims are not of this run, such as {others[0]}"
            )
        return numbers

    def _path(self, number: int) -> str:
        return f"{self._group_dir}/{self._name(number)}"

    def _name(self, number: int) -> str:
        name = f".claim-{number}"
        if self._signer is None:
            return name
        # Nobody without the key can name a claim that is still to come.
        return f"{name}-{self._signer.proof(self._signed(number))[:32]}"

    def _signed(self, number: int, text: str = "") -> bytes:
        group = self._group_dir.rpartition("/")[2]
        return f"{group} claim {number}\0{text}".encode()

    def _text(self, number: int, record: ClaimRecord) -> bytes:
        text = record.to_json()
        if self._signer is not None:
            proof = self._signer.proof(self._signed(number, text))
            fields = {**vars(record), "signature": proof}
            text = json.dumps(fields, sort_keys=True) + "\n"
        return text.encode()

    def _claim(self, number: int, text: bytes) -> Claim:
        if self._signer is None:
            return Claim(number, text, ClaimRecord.from_json(text))
        fields = untrusted.json_object(text) or {}
        proof = fields.pop("signature", "")
        record = ClaimRecord.from_json(json.dumps(fields).encode())
        if record is not None and self._signer.proves(
            proof, self._signed(number, record.to_json())
        ):
            return Claim(number, text, record)
        self._warn(f"{self._name(number)} does not say what this run has said")
        return Claim(number, b"", None)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Ignoring claims in %s: %s. Another run, or a process with "
                "another key (%s), has written there.",
                self._group_dir,
                what,
                signing.FILE_VARIABLE,
            )


class LastChange:
    """When another process's claim last changed, by this process's clock."""

    def __init__(self) -> None:
        # When what was seen last was seen first.
        self.since = 0.0
        self.num_moves = -1
        self._seen: set[tuple[int, bytes]] = set()

    def see(self, found: Claim, now: float) -> None:
        """Notes what was read; `now` is the time after it was read."""
        seen = (found.number, found.text)
        # What was there before is no sign of life, whoever puts it back.
        if seen not in self._seen:
            self._seen.add(seen)
            self.since = now
            self.num_moves += 1


class GroupClaimedError(ValueError):
    """Another process publishes for the group, and is alive."""


class ClaimLostError(RuntimeError):
    """Another process has taken the group over: stop publishing for good."""


ERRORS = (GroupClaimedError, ClaimLostError)


class GroupClaim:
    """This process's claim of one group. Threads may share it."""

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        group_dir: str,
        *,
        owner: ClaimRecord,
        lease_secs: float = LEASE_SECS,
        renew_secs: float = RENEW_SECS,
        signer: signing.Signer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage; the group's directory need not exist.

        After `lease_secs` without a sign of life from another process, its
        claim is taken over.
        """
        if not 0 < 3 * renew_secs <= lease_secs:
            raise ValueError(
                "`renew_secs` must be > 0, and `lease_secs` three times as "
                f"long or longer; received {renew_secs!r} and {lease_secs!r}."
            )
        self._group_dir = group_dir
        self._files = ClaimFiles(file_system, group_dir, signer=signer)
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

        Returns at once if the group is free or its last owner is known to be
        dead, and after the lease if that cannot be known. If the storage is
        out of reach it returns too and keeps trying in the background; nothing
        can be published before that succeeds.
        """
        try:
            self._acquire()
        except OSError as error:
            self._log_outage(error)
        self._thread.start()

    def check(self) -> None:
        """Raises what the background has found out; touches no storage."""
        if self._failure is not None:
            raise self._failure

    def confirm(self) -> None:
        """Makes sure, by looking, that the group is still this process'.

        Raises what `check` does, or a RuntimeError if the claim could not be
        taken yet.
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
                self._log_outage(error)
            except ERRORS as error:
                self._failure = error
                _log.error("%s", error)
                return
            else:
                self._out_of_reach = False
        # If this fails, the owner's death, or the lease, says the same.
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
        seen = LastChange()
        poll_secs = self._renew_secs / _LOOKS_A_RENEWAL
        while not self._stopping.is_set():
            # Before the look: this process may be frozen right after it.
            now = self._clock()
            newest = self._files.newest()
            if newest is None:
                taken = self._take(0)
            elif self._may_follow(newest, seen, now):
                taken = self._take(newest.number)
            else:
                taken = False
            if taken:
                return
            self._stopping.wait(poll_secs)

    def _may_follow(self, newest: Claim, seen: LastChange, now: float) -> bool:
        record = newest.record
        if record is not None and (
            record.is_gone() or record.incarnation == self._incarnation
        ):
            return True
        seen.see(newest, self._clock())
        if seen.num_moves >= _MOVES_OF_THE_LIVING:
            raise GroupClaimedError(
                f"{self._group_dir} must have one publisher; "
                f"{record or 'another process'} claims it and is alive. Give "
                "each group an index of its own (TFDISTILL_GROUP) and each run "
                "an exchange of its own, or end that process first."
            )
        if now - seen.since < self._lease_secs:
            return False
        _log.warning(
            "Taking over %s: %s has given no sign of life for %.0f s.",
            self._group_dir,
            record or "its owner",
            self._lease_secs,
        )
        return True

    def _take(self, before: int) -> bool:
        if before >= _MAX_NUMBER:
            raise GroupClaimedError(
                f"{self._group_dir} must have at most {_MAX_NUMBER} claims, "
                f"one for each start; found one numbered {before}, which no "
                "start has made. Remove it."
            )
        if not self._files.create(before + 1, self._owner):
            return False
        if not self._files.creates_exclusively:
            self._stopping.wait(2 * self._renew_secs)
            found = self._files.read(before + 1)
            if found is None or found.record != self._owner:
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

    def _log_outage(self, error: OSError) -> None:
        level = logging.DEBUG if self._out_of_reach else logging.WARNING
        self._out_of_reach = True
        _log.log(level, "Cannot claim %s yet: %s", self._group_dir, error)
