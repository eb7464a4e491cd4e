"""One peer's versions: found, read in the background, agreed on, swapped in.

A version goes through a group in this order: the chief *proposes* the newest
one it sees; a collective *announces* it to all workers; each *stages* it (reads
and checks it in the background); once all have it, all swap it in at the same
step. A version that any worker cannot use is rejected by all.
"""

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.system import background

_log = logging.getLogger(__name__)

PENDING, READY, FAILED = 0, 1, -1
# Storage may show the files of a version one after the other, or lose sight of
# one for a moment: what contradicts a version must be seen twice.
_LOOKS_TO_BE_SURE = 2
_CONTRADICTIONS = versions.CorruptVersionError, versions.VersionNotFoundError
# Between two tries of a version while the storage is away.
_LONGEST_PAUSE_SECS = 30.0
# Between two looks at the exchange.
_POLL_SECS = 0.1


def checked_groups(peers: Sequence[int]) -> list[int]:
    """Returns indices of groups; ValueError if they are none, or come twice."""
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )
    return list(peers)


@dataclasses.dataclass(frozen=True)
class Staged:
    """A version that was read and checked, ready to be swapped in."""

    version: versions.Version
    values: Any

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the version's graph."""
        return self.version.manifest.graph_fingerprint


class Target(NamedTuple):
    """A version to be read, by its group and its step, -1 for none."""

    group: int
    step: int = -1


class Follower:
    """Follows one peer. The training thread and one other may share it.

    Attributes:
        group: The peer. It changes if a version of another group is taken.
        current: The step of its version in use, or -1.
        wanted: Of the steps of versions, which may be proposed at present.
        yields_after: The step that the version of another group must exceed
            to take this one's place. Default: to none.
        look_further: Called after each look at the peer.
    """

    def __init__(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        read: Callable[[versions.Version], Any],
        alone: bool,
        screen: Callable[[versions.Version], None] = lambda version: None,
        max_attempts: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage.

        `read` returns a version's values, and `screen` looks at its manifest
        before any file of it is read; both raise ValueError, such as
        `Refused`, for one that must not be used. `alone` is whether this task
        decides for itself, without workers beside it. A version is given up
        when reading it has failed `max_attempts` times. If it was the storage
        that failed, a newer version must be in sight, too: until then it is
        tried again, after longer and longer pauses.
        """
        self.group = group
        self.current = -1
        self.wanted: Callable[[int], bool] = lambda step: True
        self.yields_after = math.inf
        self.look_further: Callable[[], None] = lambda: None
        self._rejected: dict[int, dict[int, str]] = collections.defaultdict(
            dict
        )
        self._exchange = exchange
        self._read = read
        self._screen = screen
        self._alone = alone
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._proposal = self._announced = Target(group)
        self._staged: Staged | None = None
        self._failure: str | None = None
        self._attempts = self._doubts = 0
        self._pause = background.Backoff(
            first_secs=1.0, longest_secs=_LONGEST_PAUSE_SECS, clock=clock
        )

    # ---- background thread ----

    def look(self) -> None:
        """Looks for the newest version that is neither in use nor rejected."""
        newest = self._exchange.latest(
            self.group, newer_than=self.current, wanted=self.is_usable
        )
        with self._lock:
            # Again: it may have been taken or rejected while the storage was
            # asked.
            if not self._is_leaving:
                is_usable = newest is not None and self.is_usable(newest)
                step = newest.step if newest and is_usable else -1
                self._proposal = Target(self.group, step)
            if self._alone and self._announced.step < 0:
                self._announce(self._proposal)
        self.look_further()

    @property
    def _is_leaving(self) -> bool:
        """Whether a version of another group is proposed, and still wanted."""
        group, step = self._proposal
        return group != self.group and step > self.yields_after

    def propose(self, version: versions.Version) -> None:
        """Proposes another group's version to take the place of the peer's."""
        with self._lock:
            self._proposal = Target(version.group, version.step)

    def is_usable(self, version: versions.Version) -> bool:
        """Whether a version is new here, and nothing speaks against it."""
        group, step = version.group, version.step
        is_new = group != self.group or step > self.current
        is_new &= step not in self._rejected[group]
        return is_new and self.wanted(step)

    def stage(self) -> None:
        """Reads the announced version, if there is one still to read."""
        with self._lock:
            target = self._announced
            if target.step < 0 or self._staged or self._failure:
                return
            if not self._pause.is_over:
                return
        staged, failure = None, None
        try:
            version = self._exchange.open(*target)
            self._screen(version)
            with self._exchange.readable(version) as readable:
                staged = Staged(version, self._read(readable))
        except Exception as error:  # TensorFlow's readers raise many kinds.
            failure = self._judged(target, error)
        with self._lock:
            if self._announced == target:
                self._staged, self._failure = staged, failure

    def _judged(self, target: Target, error: Exception) -> str | None:
        """Returns why a version is given up; None if it is tried again."""
        if isinstance(error, _CONTRADICTIONS):
            self._doubts += 1
            return str(error) if self._doubts >= _LOOKS_TO_BE_SURE else None
        if isinstance(error, ValueError):
            return str(error)
        self._attempts += 1
        _log.info("Reading version %d failed: %s", target.step, error)
        if self._attempts < self._max_attempts:
            return None
        if isinstance(error, OSError) and not self._has_newer(target):
            self._put_off(target, error)
            return None
        return f"{type(error).__name__}: {error}"

    def _has_newer(self, target: Target) -> bool:
        try:
            newest = self._exchange.latest(target.group)
        except OSError:
            return False
        return newest is not None and newest.step > target.step

    def _put_off(self, target: Target, error: OSError) -> None:
        """Lets a version be tried again: its group may publish no other."""
        if self._attempts == self._max_attempts:
            _log.warning(
                "The version %d of group %d cannot be read yet, and is tried "
                "again: %s: %s. Training continues without it.",
                target.step,
                target.group,
                type(error).__name__,
                error,
            )
        self._pause.failed()

    # ---- training thread ----

    @property
    def proposal(self) -> Target:
        """What could be announced."""
        with self._lock:
            return self._proposal

    @property
    def newest(self) -> int:
        """The step of the version that could be announced, or -1."""
        return self.proposal.step

    @property
    def announced(self) -> int:
        """The step of the version being staged, or -1."""
        return self._announced.step

    @property
    def groups(self) -> set[int]:
        """The peer, and the group that is about to take its place."""
        with self._lock:
            return {self.group, self._proposal.group, self._announced.group}

    @property
    def rejected(self) -> dict[int, str]:
        """Why versions of the peer are quarantined, by their steps."""
        return self._rejected[self.group]

    @property
    def state(self) -> int:
        """Whether the announced version is READY, FAILED or PENDING here."""
        with self._lock:
            if self._announced.step < 0:
                return PENDING
            if self._failure is not None:
                return FAILED
            return READY if self._staged else PENDING

    @property
    def staged(self) -> Staged | None:
        """What `take` would return, if there is anything."""
        with self._lock:
            return self._staged

    def follow(self, group: int) -> None:
        """Follows another group from now on, before anything was taken."""
        with self._lock:
            self.group = group
            self._proposal = Target(group)
            self._announce(Target(group))

    def announce(self, step: int, group: int | None = None) -> None:
        """Makes `step` the version that all workers stage; -1 for none.

        Of another group, if one is given; it takes the place of the peer.
        """
        with self._lock:
            self._announce(Target(self.group if group is None else group, step))

    def _announce(self, target: Target) -> None:
        self._announced = target
        self._staged = self._failure = None
        self._attempts = self._doubts = 0
        self._pause.succeeded()

    def take(self) -> Staged:
        """Returns the staged version and makes it the current one."""
        with self._lock:
            staged = self._staged
            if staged is None:
                raise RuntimeError(
                    f"group {self.group}: no version is ready to be taken."
                )
            has_moved = self._announced.group != self.group
            self.group, self.current = self._announced
            group, step = self._proposal
            if has_moved or (group == self.group and step <= self.current):
                self._proposal = Target(self.group)
            self._announce(Target(self.group))
            return staged

    def reject(
        self, step: int, reason: str | None = None, *, group: int | None = None
    ) -> None:
        """Quarantines a version: its step is never proposed again.

        By default of the group whose version is announced. The log warns, but
        once only for the same reason, by default what this worker found.
        """
        with self._lock:
            reason = reason or self._failure or "another worker refused it"
            group = self._announced.group if group is None else group
            rejected = self._rejected[group]
            if step not in rejected:
                # Every later version may have the same fault.
                known = reason in rejected.values()
                _log.log(
                    logging.INFO if known else logging.WARNING,
                    "Quarantined version %d of group %d: %s "
                    "Training continues without this version.",
                    step,
                    group,
                    reason,
                )
            rejected.setdefault(step, reason)
            if self._proposal == (group, step):
                self._proposal = Target(self.group)
            if self._announced == (group, step):
                self._announce(Target(self.group))


class Following(threading.Thread):
    """Looks and reads for all followers, in turn, until it is stopped."""

    def __init__(
        self,
        followers: Sequence[Follower],
        *,
        proposes: bool,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing yet; `proposes` if this task looks for versions.

        `also` is called in each round.
        """
        super().__init__(name="tfdistill-following", daemon=True)
        self._followers = followers
        self._proposes = proposes
        self._also = also
        self._out_of_reach: set[int] = set()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Looks and reads; errors are logged and tried again."""
        while not self._stopping.is_set():
            for follower in self._followers:
                try:
                    if self._proposes:
                        follower.look()
                    follower.stage()
                except OSError as error:
                    self._log_outage(follower.group, error)
                except Exception:
                    _log.exception(
                        "Looking for group %d failed", follower.group
                    )
                else:
                    self._out_of_reach.discard(follower.group)
            try:
                self._also()
            except Exception:
                _log.exception("The work beside looking for versions failed")
            self._stopping.wait(_POLL_SECS)

    def _log_outage(self, group: int, error: OSError) -> None:
        """Tells of an outage once: it may last for many rounds."""
        level = logging.DEBUG if group in self._out_of_reach else logging.ERROR
        self._out_of_reach.add(group)
        _log.log(level, "Cannot look for group %d yet: %s", group, error)

    def stop(self) -> None:
        """Ends the thread; waits 30 s at most for a read in progress."""
        self._stopping.set()
        self.join(timeout=30.0)
