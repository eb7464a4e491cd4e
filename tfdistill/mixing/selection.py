"""Which versions a mix takes, and when: all workers of a group find the same.

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

import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.mixing import followers as followers_lib
from tfdistill.system import background

# Between two rounds of a mix that waits.
_PAUSE_SECS = 0.005


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
        is_count = isinstance(quorum, numbers.Integral) and quorum is not True
        if quorum != "all" and not (is_count and int(quorum) >= 1):
            raise ValueError(
                "`quorum` must be how many peers a mix needs, >= 1, or 'all'; "
                f"received {quorum!r}."
            )
        if not 0 <= grace_secs < math.inf:
            raise ValueError(
                f"`grace_secs` must be finite and >= 0; received {grace_secs}."
            )
        most = max_staleness_steps
        if most is not None and not 0 <= most < math.inf:
            raise ValueError(
                f"`max_staleness_steps` must be >= 0 or None; received {most}."
            )
        self._quorum, self._grace_secs = quorum, grace_secs
        self._clock = clock
        self._max_staleness_steps = most
        # By group, the newest version in sight when it was missing.
        self._missed: dict[int, int] = {}
        self.num_waits = 0
        self.waits = background.WorkTimes()

    @property
    def looks_ahead(self) -> bool:
        """Whether versions are read before the mix, which then never waits."""
        return not self._grace_secs

    def start(
        self,
        followers: Mapping[int, follower.Follower],
        origin: followers_lib.Origin,
        exporter: Any,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Takes what a training has: the same followers on all workers."""
        self._followers, self._origin = followers, origin
        self._exporter, self._groups = exporter, list(followers)
        num = len(followers)
        size = agreement.num_fields(num, num_said=num, num_as_chief=1)
        self._agreement = agreement.Agreement(
            list(followers.values()),
            agreement.of_coordinator
            if replicas.on_servers(strategy)
            else agreement.collective_sum(strategy, size=size),
            num_workers=replicas.num_workers(strategy),
            is_chief=replicas.is_chief(strategy),
            num_said=num,
            num_as_chief=1,
        )

    def look_ahead(
        self, step: int, now: Sequence[int], later: Sequence[int]
    ) -> None:
        """Has all workers read what the next mix, with `later`, will take.

        `now` are the peers of the mix before it.
        """
        news = self._exchange_news()
        self._announce(news, later, replace=False)
        # What has become too old makes room for a newer one; so does what was
        # read too late for an earlier pair.
        old = {g for g in news.ready if not self._is_recent(g, step)}
        old.update(set(later).difference(now))
        self._announce(news, old.intersection(later), replace=True)

    def chosen(self, step: int, groups: Sequence[int]) -> list[int]:
        """Returns the peers to mix with; every worker has read from them."""
        need = len(groups) if self._quorum == "all" else int(self._quorum)
        if self.looks_ahead:
            ready: Collection[int] = set(self._exchange_news().ready)
            ready = set(groups).intersection(ready)
        else:
            for group in groups:
                self._followers[group].limit = step
            with self.waits.measured():
                ready = self._awaited(step, groups, need)
        recent = sorted(g for g in ready if self._is_recent(g, step))
        return recent if len(recent) >= need else []

    def repeated(self, mixed: Mapping[int, int]) -> list[int]:
        """Has every worker read the versions of an earlier mix, and waits.

        Returns the groups of which all have read it.
        """
        wanted = {
            index: mixed[group]
            for index, group in enumerate(self._groups)
            if group in mixed
        }
        found = self._agreement.read(wanted) if wanted else []
        return sorted(self._groups[index] for index in found)

    def _exchange_news(self, *, is_over: bool = False) -> News:
        """Tells the others what this worker knows; rejects what failed.

        `is_over` counts on the chief. RuntimeError if any worker found a group
        that began with other weights.
        """
        groups = self._groups
        news = self._agreement.exchange_news(
            said=[group in self._origin.strangers for group in groups],
            as_chief=[is_over],
        )
        self._origin.refuse(
            [g for g, num in zip(groups, news.said, strict=True) if num]
        )
        ready = [groups[index] for index in news.ready]
        return News(
            newest=dict(zip(groups, news.newest, strict=True)),
            ready={group: self._followers[group].announced for group in ready},
            failed=[groups[index] for index in news.failed],
            is_over=bool(news.as_chief[0]),
        )

    def _announce(
        self, news: News, groups: Collection[int], *, replace: bool
    ) -> None:
        """Has every worker read the newest versions of these groups.

        With `replace`, also where another version was announced before.
        """
        for group in set(groups).difference(news.failed):
            each, step = self._followers[group], news.newest[group]
            is_free = replace or each.announced < 0
            if is_free and step >= 0 and each.announced != step:
                each.announce(step)

    def _is_recent(self, group: int, step: int) -> bool:
        """Whether what all workers have read of a group is within the bound."""
        staged, most = self._followers[group].staged, self._max_staleness_steps
        if staged is None:
            return False
        return most is None or step - staged.version.step <= most

    def _awaited(
        self, step: int, groups: Sequence[int], need: int
    ) -> Collection[int]:
        """Waits for versions of this step, while there is hope and time."""
        deadline = self._clock() + self._grace_secs
        self._exporter.ensure_published(self._grace_secs)
        num_rounds = 0
        while True:
            is_over = self._clock() >= deadline
            news = self._exchange_news(is_over=is_over)
            num_rounds += 1
            ready = set(news.ready).intersection(groups)
            exact = {group for group in ready if news.ready[group] == step}
            for group in news.failed:
                self._missed[group] = news.newest[group]
            alive = {
                group
                for group in groups
                if news.newest[group] > self._missed.get(group, -2)
            }
            if len(exact) >= need or alive <= exact:
                break
            if news.is_over or len(alive | ready) < need:
                break
            self._announce(news, groups, replace=True)
            time.sleep(_PAUSE_SECS)
        self.num_waits += num_rounds > 1
        if len(exact) >= need:
            return exact
        for group in alive - exact:
            self._missed[group] = news.newest[group]
        return ready if len(ready) >= need else ()
