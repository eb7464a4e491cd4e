"""What the workers of a group agree on before a mix: which versions, and when.

In each round all workers exchange a few numbers by one small collective, after
which all know the same of each peer. So they all draw the same conclusions.
"""

import dataclasses
import math
import numbers
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.mixing import journal as journal_lib
from tfdistill.mixing import readers as readers_lib
from tfdistill.system import background

# Of each peer: the newest version in sight of the chief; whether this worker
# has read the one that was announced, or failed to; whether it began with
# other weights. Besides, whether the chief waits no longer, and whether it
# wants mixing to end.
_FIELDS = 4
# Between two rounds of a mix that waits.
_PAUSE_SECS = 0.005
# The longest wait for a version that a mix is to be repeated with.
_REPLAY_SECS = 60.0


def num_fields(num_peers: int) -> int:
    """Returns the length of the vector that a round sums."""
    return _FIELDS * num_peers + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What all workers know after a round.

    Attributes:
        newest: By group, the newest version that could be used, or -1.
        ready: By group, the announced version that every worker has read.
        failed: Groups whose announced version was rejected in this round.
        is_over: Whether the time to wait is over.
    """

    newest: Mapping[int, int]
    ready: Mapping[int, int]
    failed: Collection[int]
    is_over: bool


class Rounds:
    """Moves the readers of all workers alike; all call at the same step.

    Attributes:
        mixing_ends: Whether the group mixes no more, by its chief's wish.
    """

    def __init__(
        self,
        readers: Mapping[int, follower.Follower],
        origin: readers_lib.Origin,
        sum_over_group: agreement.Sum,
        *,
        num_workers: int,
        is_chief: bool,
        wants_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes the readers by group, the same groups on all workers.

        `wants_end` says on the chief whether mixing is to end.
        """
        self._readers = readers
        self._origin = origin
        self._sum = sum_over_group
        self._num_workers = num_workers
        self._is_chief = is_chief
        self._wants_end = wants_end
        self.mixing_ends = False

    def exchange_news(self, *, is_over: bool = False) -> News:
        """Tells the others what this worker knows; rejects what failed.

        `is_over` counts on the chief. RuntimeError if any worker found a group
        that began with other weights.
        """
        news = np.zeros([_FIELDS, len(self._readers)], np.int64)
        for index, (group, reader) in enumerate(self._readers.items()):
            state = reader.state
            news[0, index] = (reader.newest + 1) * self._is_chief
            news[1, index] = state == follower.READY
            news[2, index] = state == follower.FAILED
            news[3, index] = group in self._origin.strangers
        flags = np.array([is_over, self._wants_end()], np.int64)
        flags *= self._is_chief
        summed, _ = self._sum(np.append(news.reshape(-1), flags))
        newest, ready, failed, strange = summed[:-2].reshape(_FIELDS, -1)
        groups = enumerate(self._readers.items())
        found: dict[str, dict[int, int]] = {"newest": {}, "ready": {}}
        for index, (group, reader) in groups:
            found["newest"][group] = int(newest[index]) - 1
            if ready[index] == self._num_workers:
                found["ready"][group] = reader.announced
            if failed[index]:
                reader.reject(reader.announced)
        names = list(self._readers)
        self._origin.refuse([names[i] for i in np.flatnonzero(strange)])
        self.mixing_ends |= bool(summed[-1])
        return News(
            **found,
            failed=[names[i] for i in np.flatnonzero(failed)],
            is_over=bool(summed[-2]),
        )

    def announce(
        self, news: News, groups: Collection[int], *, replace: bool
    ) -> None:
        """Has every worker read the newest versions of these groups.

        With `replace`, also where another version was announced before.
        """
        for group in set(groups).difference(news.failed):
            if replace or self._readers[group].announced < 0:
                self.announce_one(group, news.newest[group])

    def announce_one(self, group: int, step: int) -> None:
        """Has every worker read a version, unless it is doing so."""
        reader = self._readers[group]
        if step >= 0 and reader.announced != step:
            reader.announce(step)


class Selection:
    """Chooses the versions of each mix, the same on all workers.

    Attributes:
        num_waits: Mixes that had to wait.
        waits: How long the training thread waited.
    """

    def __init__(
        self,
        *,
        quorum: int | str,
        grace_secs: float,
        max_staleness_steps: int | None,
        clock: Callable[[], float],
    ) -> None:
        """Checks what a `WeightMixer` was given. ValueError if it is wrong."""
        _check_wait(quorum, grace_secs)
        most = self._max_staleness_steps = max_staleness_steps
        if most is not None and not 0 <= most < math.inf:
            raise ValueError(
                f"`max_staleness_steps` must be >= 0 or None; received {most}."
            )
        self.quorum, self.grace_secs = quorum, grace_secs
        self._clock = clock
        # By group, the newest version in sight when it was missing.
        self.missed: dict[int, int] = {}
        self.num_waits = 0
        self.waits = background.WorkTimes()

    @property
    def looks_ahead(self) -> bool:
        """Whether versions are read before the mix, which then never waits."""
        return not self.grace_secs

    def forget(self) -> None:
        """Begins a training anew."""
        self.missed.clear()
        self.num_waits = 0

    def start(
        self,
        readers: Mapping[int, follower.Follower],
        rounds: Rounds,
        journal: journal_lib.Journal,
        exporter: Any,
    ) -> None:
        """Takes what a training has, once it begins."""
        self._readers, self._rounds = readers, rounds
        self._journal, self._exporter = journal, exporter

    def look_ahead(
        self, step: int, now: Sequence[int], later: Sequence[int]
    ) -> None:
        """Has all workers read what the next mix, with `later`, will take.

        `now` are the peers of the mix before it.
        """
        news = self._rounds.exchange_news()
        self._rounds.announce(news, later, replace=False)
        # What has become too old makes room for a newer one; so does what was
        # read too late for an earlier pair.
        old = {g for g in news.ready if not self._is_recent(g, step)}
        old.update(set(later).difference(now))
        self._rounds.announce(news, old.intersection(later), replace=True)

    def chosen(self, step: int, groups: Sequence[int]) -> list[int]:
        """Returns the peers to mix with; every worker has read from them."""
        before = self._journal.replay(step)
        if before is not None:
            return self._repeated(step, before.versions)
        need = len(groups) if self.quorum == "all" else int(self.quorum)
        if self.looks_ahead:
            ready = sorted(
                set(self._rounds.exchange_news().ready).intersection(groups)
            )
        else:
            for group in groups:
                self._readers[group].limit = step
            with self.waits.measured():
                ready = self._awaited(step, groups, need)
        recent = [group for group in ready if self._is_recent(group, step)]
        return recent if len(recent) >= need else []

    def _is_recent(self, group: int, step: int) -> bool:
        """Whether what all workers have read of a group is within the bound."""
        staged, most = self._readers[group].staged, self._max_staleness_steps
        if staged is None:
            return False
        return most is None or step - staged.version.step <= most

    def _awaited(
        self, step: int, groups: Sequence[int], need: int
    ) -> list[int]:
        """Waits for versions of this step, while there is hope and time."""
        deadline = self._clock() + self.grace_secs
        self._exporter.ensure_published(self.grace_secs)
        num_rounds = 0
        while True:
            news = self._rounds.exchange_news(is_over=self._clock() >= deadline)
            num_rounds += 1
            ready = {g: news.ready[g] for g in groups if g in news.ready}
            exact = [g for g in ready if ready[g] == step]
            for group in news.failed:
                self.missed[group] = news.newest[group]
            alive = {
                group
                for group in groups
                if news.newest[group] > self.missed.get(group, -2)
            }
            if len(exact) >= need:
                break
            if news.is_over or len(alive.union(ready)) < need:
                break
            if alive <= set(exact):
                break
            self._rounds.announce(news, groups, replace=True)
            time.sleep(_PAUSE_SECS)
        self.num_waits += num_rounds > 1
        if len(exact) >= need:
            return sorted(exact)
        for group in alive.difference(exact):
            self.missed[group] = news.newest[group]
        return sorted(ready) if len(ready) >= need else []

    def _repeated(self, step: int, mixed: Mapping[int, int]) -> list[int]:
        """Reads what was mixed at this step before the training was stopped."""
        deadline = self._clock() + _REPLAY_SECS
        wanted = {g: s for g, s in mixed.items() if g in self._readers}
        for group, wanted_step in wanted.items():
            self._rounds.announce_one(group, wanted_step)
        while True:
            news = self._rounds.exchange_news(is_over=self._clock() >= deadline)
            for group in news.failed:
                wanted.pop(group, None)
            ready = [g for g in wanted if g in news.ready]
            if news.is_over or len(ready) == len(wanted):
                break
            time.sleep(_PAUSE_SECS)
        if len(ready) < len(mixed):
            self._journal.warn(step)
        return sorted(ready)


def _check_wait(quorum: Any, grace_secs: Any) -> None:
    is_count = isinstance(quorum, numbers.Integral) and quorum is not True
    if quorum != "all" and not (is_count and quorum >= 1):
        raise ValueError(
            "`quorum` must be how many peers a mix needs, >= 1, or 'all'; "
            f"received {quorum!r}."
        )
    is_number = isinstance(grace_secs, numbers.Real)
    if not is_number or not 0 <= grace_secs < math.inf:
        raise ValueError(
            f"`grace_secs` must be finite and >= 0; received {grace_secs!r}."
        )
