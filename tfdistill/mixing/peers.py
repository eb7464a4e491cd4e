"""The peers' versions: whose are read, and which of them a mix takes.

In each round all workers of a group exchange a few numbers by one small
collective, after which all know the same of each peer. So they all draw the
same conclusions.
"""

import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib

# In a manifest's `extras`: the SHA-256 of the weights at step 0, and the rule
# by which the group mixes.
INITIAL_FIELD, RULE_FIELD = "initial_weights", "mixing_rule"
# Between two rounds of a mix that waits.
_PAUSE_SECS = 0.005


def check_origin(version: versions.Version, ours: Mapping[str, Any]) -> None:
    """Refuses versions whose weights cannot be averaged with this group's.

    `ours` are the `extras` of this group's own manifests.
    """
    theirs = version.manifest.extras
    began = theirs.get(INITIAL_FIELD)
    if not isinstance(began, str):
        raise screen_lib.Refused(
            "its manifest doesn't record the weights its group began with. "
            "Give each group's `fit` a tfdistill.mixing.WeightMixer."
        )
    if began != ours[INITIAL_FIELD]:
        raise screen_lib.Refused(
            f"its group began with the weights {began:.64}, and this group "
            f"with {ours[INITIAL_FIELD]}; groups that mix must begin with "
            "equal weights. Call keras.utils.set_random_seed with the same "
            "number in all groups before the model is built, and use a new "
            "exchange directory for a new run."
        )
    rule = theirs.get(RULE_FIELD, ours[RULE_FIELD])
    if rule != ours[RULE_FIELD]:
        raise screen_lib.Refused(
            f"its group mixes by {rule!s:.200}, and this group by "
            f"{ours[RULE_FIELD]}. Give the WeightMixers of all groups the same "
            "rule."
        )


class Source(NamedTuple):
    """Where followers find what is mixed, and how they read and check it.

    `publish_own` has this group's own version published, in so many seconds at
    most.
    """

    store: Any
    read: Callable[[versions.Version], Any]
    screen: Callable[[versions.Version], None]
    publish_own: Callable[[float], None] = lambda secs: None


class Rounds:
    """Chooses the versions of each mix, the same on all workers."""

    def __init__(
        self,
        groups: Sequence[int],
        source: Source,
        strategy: tf.distribute.Strategy,
        *,
        wait_secs: float,
        is_exact: bool,
        clock: Callable[[], float],
    ) -> None:
        """Makes the `followers` of a source, the same on all workers.

        With `is_exact`, a mix that waits takes no versions of other steps than
        its own.
        """
        self._is_exact = is_exact
        self._publish_own = source.publish_own
        self._wait_secs, self._clock = wait_secs, clock
        # A later version than the first mix's is not for it.
        self._step = -1
        self._groups = groups
        self.followers = {
            group: follower.Follower(
                source.store,
                group,
                read=source.read,
                screen=source.screen,
                wanted=self._is_wanted,
                alone=False,
            )
            for group in groups
        }
        self._followers = [*self.followers.values()]
        self._agreement = agreement.Agreement(strategy, self._followers)
        # For each peer, the newest version in sight when it was missing.
        self._missed = [-2] * len(self._followers)

    def want(self, step: int) -> None:
        """From now on takes versions of a step, or perhaps earlier ones."""
        self._step = step

    def _is_wanted(self, found: versions.Version) -> bool:
        if not self._wait_secs:
            return True
        is_earlier = found.step < self._step and not self._is_exact
        return found.step == self._step or is_earlier

    def look_ahead(self) -> None:
        """Makes all workers read what the next mix will take."""
        self._agreement.announce(self._agreement.exchange_news().newest)

    def ready(self) -> list[int]:
        """Returns the groups from which every worker has read a version."""
        return self._named(self._agreement.exchange_news().ready)

    def repeated(self, mixed: Mapping[int, int]) -> list[int]:
        """Makes every worker read the versions of an earlier mix, and waits.

        Returns the groups whose version all workers have read.
        """
        wanted = {
            index: mixed[group]
            for index, group in enumerate(self._groups)
            if group in mixed
        }
        found = self._agreement.read(wanted) if wanted else []
        return self._named(found)

    def _named(self, indices: Sequence[int]) -> list[int]:
        return sorted(self._groups[index] for index in indices)

    def _announce(self, news: agreement.News, index: int) -> None:
        """Makes every worker read the newest version of a peer."""
        newest, each = news.newest[index], self._followers[index]
        if index not in news.failed and newest >= 0:
            if each.announced != newest:
                each.announce(newest)

    def awaited(self, step: int) -> tuple[list[int], bool]:
        """Waits for versions of this step, while there is hope and time.

        Returns what `ready` does then, and whether it had to wait.
        """
        self.want(step)
        deadline = self._clock() + self._wait_secs
        self._publish_own(self._wait_secs)
        num_rounds = 0
        while True:
            is_over = self._agreement.chiefs([self._clock() >= deadline])
            news = self._agreement.exchange_news(is_over=is_over)
            num_rounds += 1
            for index in news.failed:
                self._missed[index] = news.newest[index]
            late = [
                index
                for index, newest in enumerate(news.newest)
                if newest > self._missed[index]
                and not (
                    index in news.ready
                    and self._followers[index].announced == step
                )
            ]
            if any(news.sums["is_over"]) or not late:
                break
            for index in range(len(self._followers)):
                self._announce(news, index)
            time.sleep(_PAUSE_SECS)
        for index in late:
            self._missed[index] = news.newest[index]
        return self._named(news.ready), num_rounds > 1
