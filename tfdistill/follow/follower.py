"""One peer's versions: found, read in the background, agreed on, swapped in.

A version goes through a group in this order: the chief *proposes* the newest
one it sees; a collective *announces* it to all workers; each *stages* it (reads
and checks it in the background); once all have it, all swap it in at the same
step. A version that any worker cannot use is rejected by all.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import store
from tfdistill.exchange import versions
from tfdistill.system import background

_log = logging.getLogger(__name__)

PENDING, READY, FAILED = 0, 1, -1
# Storage may show the files of a version one after the other, or lose sight of
# one for a moment: what contradicts a version must be seen twice.
_LOOKS_TO_BE_SURE = 2
CONTRADICTIONS = versions.CorruptVersionError, versions.VersionNotFoundError
# A version not in sight may still come: it isn't a contradiction.
_ABSENT = versions.IncompleteVersionError, versions.VersionNotFoundError
# After so many bad deltas of one key frame, no more are tried.
_MOST_BAD_DELTAS = 2
# How often reading a version is tried, and the pause between two tries while
# the storage is away.
_MOST_TRIES = 5
_LONGEST_PAUSE_SECS = 30.0
# Between two looks at the exchange.
POLL_SECS = 0.1
# Weight of the seconds of a long read, such as of a whole version among deltas,
# once the next version has been read.
_REMEMBERED = 0.8


def checked_groups(
    peers: Sequence[int], *, own: int | None = None
) -> list[int]:
    """Returns indices of groups; ValueError if they are none, or come twice.

    `own` is this group's, once that is known, and no peer's.
    """
    is_index = isinstance(peers, Iterable) and all(
        isinstance(group, int) and group >= 0 for group in peers
    )
    if not is_index or len({*peers, own}) != len(peers) + 1:
        raise ValueError(
            "`peers` must list the indices of other groups, >= 0, each once; "
            "received "
            f"{peers!r}{'' if own is None else f', and this is group {own}'}. "
            "Leave `peers` out for all others."
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


class Follower:
    """Follows one peer. The training thread and one other may share it."""

    def __init__(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        read: Callable[[versions.Version], Any],
        alone: bool,
        screen: Callable[[versions.Version], None] = lambda version: None,
        wanted: Callable[[versions.Version], bool] = lambda version: True,
        deltas_of: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage.

        `read` returns a version's values, and `screen` looks at its manifest
        before any file of it is read; both raise ValueError, such as
        `Refused`, for one that must not be used. `wanted` is whether a version
        may be proposed at present. `alone` is whether this task decides for
        itself, without workers beside it. A version is given up
        when reading it has failed five times. If it was the storage that
        failed, a newer version must be in sight, too: until then it is tried
        again, after longer and longer pauses. So is one of which something is
        not in sight, which gives way to a newer one after two looks.
        `read` takes the deltas of the graph with the fingerprint `deltas_of`
        as well.
        """
        self.group = group
        self.current = -1
        self.rejected: dict[int, str] = {}
        self._exchange = exchange
        self._read = read
        self._screen, self._wanted = screen, wanted
        self._alone = alone
        self._deltas_of = deltas_of
        # The key frame of the version in use, if its group publishes deltas.
        self.frame: int | None = None
        self._lock = threading.Lock()
        self._proposal = -1
        self._announced = -1
        self._staged: Staged | None = None
        self._failure: str | None = None
        self._attempts = self._doubts = 0
        self._is_absent = False
        # Statistics of the reading thread.
        self.reads = background.WorkTimes()
        self.read_secs = 0.0
        # Set when a version was taken: the next one may be looked for.
        self._awakes = threading.Event()
        self._pause = background.Backoff(
            first_secs=1.0, longest_secs=_LONGEST_PAUSE_SECS, clock=clock
        )

    # ---- background thread ----

    def look(self) -> None:
        """Looks for the newest version that is neither in use nor rejected."""
        # A version already proposed is not opened again until announced.
        newest = self._latest(
            max(self.current, self.newest), wanted=self._is_usable
        )
        with self._lock:
            # Again: it may have been taken or rejected while the storage was
            # asked.
            if newest is not None and self._is_usable(newest):
                self._proposal = newest.step
            if self._alone and self._announced < 0:
                self._announce(self._beyond_current())

    def _latest(
        self, newer_than: int, *, wanted: Callable[[versions.Version], bool]
    ) -> versions.Version | None:
        """Returns the newest version, a delta if there is one of its step.

        A follower of deltas reads nothing else as long as deltas arrive.
        """
        delta = None
        if self._reads_deltas:
            delta = self._exchange.deltas.latest(
                self.group,
                newer_than=newer_than,
                wanted=lambda each: self._is_readable(each) and wanted(each),
            )
            if delta and self.frame is not None:
                return delta
            newer_than = delta.step if delta else newer_than
        found = self._exchange.latest(
            self.group, newer_than=newer_than, wanted=wanted
        )
        return found or delta

    @property
    def _reads_deltas(self) -> bool:
        """Whether there may be deltas: of what it has not seen, there may."""
        is_first = bool(self._deltas_of) and self.current < 0
        return is_first or self.frame is not None

    @property
    def frames(self) -> set[int]:
        """The key frames whose deltas can be put over the version in use."""
        return set() if self.frame is None else {self.frame, self.current}

    def _is_readable(self, delta: versions.Version) -> bool:
        frame = deltas.frame_of(delta.manifest)
        if frame is None or delta.manifest.graph_fingerprint != self._deltas_of:
            return False
        return sum(step > frame for step in self.rejected) < _MOST_BAD_DELTAS

    def _open(
        self, group: int, step: int
    ) -> tuple[store.VersionStore, versions.Version]:
        """Opens a version where it is: a delta before a frame of its step.

        So all workers take the same: the delta was there first. After two bad
        ones, which all have rejected, they all take the frame.
        """
        if self._reads_deltas:
            with contextlib.suppress(versions.VersionNotFoundError):
                store = self._exchange.deltas
                delta = store.open(group, step)
                if self._is_readable(delta):
                    return store, delta
        return self._exchange, self._exchange.open(group, step)

    def _is_usable(self, version: versions.Version) -> bool:
        step = version.step
        is_new = step > self.current and step not in self.rejected
        return is_new and version.group == self.group and self._wanted(version)

    def stage(self) -> None:
        """Reads the announced version, if there is one still to read."""
        with self._lock:
            group, step = self.group, self._announced
            if step < 0 or self._staged or self._failure:
                return
            if not self._pause.is_over:
                return
        staged, failure = None, None
        try:
            with self.reads.measured():
                store, version = self._open(group, step)
                self._screen(version)
                with store.readable(version) as readable:
                    staged = Staged(version, self._read(readable))
            took = self.reads.last_secs or 0.0
            self.read_secs = max(took, _REMEMBERED * self.read_secs)
        except Exception as error:  # TensorFlow's readers raise many kinds.
            failure = self._judged(step, error)
        with self._lock:
            if (self.group, self._announced) == (group, step):
                self._staged, self._failure = staged, failure

    def _judged(self, step: int, error: Exception) -> str | None:
        """Returns why a version is given up; None if it is tried again."""
        is_absent = self._is_absent = isinstance(error, _ABSENT)
        if isinstance(error, CONTRADICTIONS) and not is_absent:
            self._doubts += 1
            return str(error) if self._doubts >= _LOOKS_TO_BE_SURE else None
        if isinstance(error, ValueError):
            return str(error)
        self._attempts += 1
        _log.info("Reading version %d failed: %s", step, error)
        tries = _LOOKS_TO_BE_SURE if is_absent else _MOST_TRIES
        if self._attempts < tries:
            return None
        may_come = is_absent or isinstance(error, OSError)
        if may_come and not self._has_newer(step):
            if self._attempts >= _MOST_TRIES:
                self._put_off(step, error)
            return None
        return str(error) if is_absent else f"{type(error).__name__}: {error}"

    def _has_newer(self, step: int) -> bool:
        try:
            newer = self._latest(step, wanted=lambda version: True)
        except OSError:
            return False
        return newer is not None

    def _put_off(self, step: int, error: Exception) -> None:
        """Lets a version be tried again: its group may publish no other."""
        if self._attempts == _MOST_TRIES:
            _log.warning(
                "Version %d of group %d cannot be read yet: %s: %s. Training "
                "continues without it and tries again later.",
                step,
                self.group,
                type(error).__name__,
                error,
            )
        self._pause.failed()

    # ---- training thread ----

    @property
    def newest(self) -> int:
        """The newest version that could be announced, or -1."""
        with self._lock:
            return self._beyond_current()

    def _beyond_current(self) -> int:
        return self._proposal if self._proposal > self.current else -1

    @property
    def announced(self) -> int:
        """The step of the version being staged, or -1."""
        return self._announced

    @property
    def state(self) -> int:
        """Whether the announced version is READY, FAILED or PENDING here."""
        with self._lock:
            if self._announced < 0:
                return PENDING
            if self._failure is not None:
                return FAILED
            return READY if self._staged else PENDING

    @property
    def is_absent(self) -> bool:
        """Whether the announced version was looked for in vain, five times."""
        return self._attempts >= _MOST_TRIES and self._is_absent

    @property
    def staged(self) -> Staged | None:
        """What `take_staged` would return, if there is anything."""
        with self._lock:
            return self._staged

    def follow(self, group: int) -> None:
        """Follows another group from now on, as if it were the first."""
        with self._lock:
            self.group, self.current = group, -1
            self.rejected, self._proposal = {}, -1
            self.frame = None
            self._announce(-1)

    def announce(self, step: int) -> None:
        """Makes `step` the version that all workers stage; -1 for none."""
        with self._lock:
            self._announce(step)

    def _announce(self, step: int) -> None:
        self._announced = step
        self._staged = self._failure = None
        self._attempts = self._doubts = 0
        self._pause.succeeded()

    def awake_when_taken(self, event: threading.Event) -> None:
        """From now on sets an event whenever a version was taken."""
        with self._lock:
            self._awakes = event

    def take_staged(self) -> Staged:
        """Returns the staged version and makes it the current one."""
        with self._lock:
            staged = self._staged
            if staged is None:
                raise RuntimeError(
                    f"group {self.group}: no version is ready to be taken."
                )
            self.current = staged.version.step
            self.frame = None
            if staged.fingerprint == self._deltas_of:
                self.frame = deltas.frame_of(staged.version.manifest)
            self._announce(-1)
            self._awakes.set()
        return staged

    def reject(self, step: int, reason: str | None = None) -> None:
        """Quarantines a version: its step is never proposed again.

        The log warns, but once only for the same reason, by default what this
        worker found.
        """
        with self._lock:
            reason = reason or self._failure or "another worker refused it"
            if step not in self.rejected:
                # Every later version may have the same fault.
                known = reason in self.rejected.values()
                _log.log(
                    logging.INFO if known else logging.WARNING,
                    "Quarantined version %d of group %d: %s "
                    "Training continues without this version.",
                    step,
                    self.group,
                    reason,
                )
            self.rejected.setdefault(step, reason)
            if self._proposal == step:
                self._proposal = -1
            if self._announced == step:
                self._announce(-1)


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
        self._is_stopping = False
        self._awake = threading.Event()
        for each in followers:
            each.awake_when_taken(self._awake)

    def run(self) -> None:
        """Looks and reads; errors are logged and tried again."""
        while not self._is_stopping:
            self._awake.clear()
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
            self._awake.wait(POLL_SECS)

    def _log_outage(self, group: int, error: OSError) -> None:
        """Logs an outage as an error once: it may last for many rounds."""
        level = logging.DEBUG if group in self._out_of_reach else logging.ERROR
        self._out_of_reach.add(group)
        _log.log(level, "Cannot look for group %d yet: %s", group, error)

    def stop(self) -> None:
        """Ends the thread; waits 30 s at most for a read in progress."""
        self._is_stopping = True
        self._awake.set()
        self.join(timeout=30.0)
