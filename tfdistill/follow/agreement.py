"""What the workers of a group agree on about versions, by one collective.

The chief proposes, each worker says what it has read, and after the sum all
know the same: so all announce, reject and take the same versions at the same
step.
"""

import dataclasses
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.follow import follower

_log = logging.getLogger(__name__)
# A worker's report on each follower: the newest version in sight of the chief,
# whether its own is read, and whether it could not be.
_FIELDS = 3
# How long storage that fails is tried for a version that was asked for, and the
# time between two tries.
_READ_TIMEOUT_SECS, _RETRY_SECS = 60.0, 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What all workers know after a collective; followers by their index.

    Attributes:
        newest: For each follower, the newest version that could be used, -1
            for none.
        ready: Followers whose announced version every worker has read.
        failed: Followers whose announced version some worker could not read,
            and which all have rejected.
        sums: The sums of the workers' own numbers, by their names.
    """

    newest: Sequence[int]
    ready: Sequence[int]
    failed: Sequence[int]
    sums: Mapping[str, Sequence[int]]


class Agreement:
    """Moves the followers of all workers alike; all call at the same step."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        followers: Sequence[follower.Follower],
    ) -> None:
        """Takes the followers, in the same order on all workers."""
        self._followers = followers
        self._sum = replicas.WorkerValues(strategy).summed
        self._num_workers = replicas.num_workers(strategy)
        self._is_chief = replicas.is_chief(strategy)

    def chiefs(self, values: Sequence[int]) -> Sequence[int]:
        """Returns numbers of which all learn the chief's, to be sent."""
        return values if self._is_chief else [0] * len(values)

    def exchange_news(self, **numbers: Sequence[int]) -> News:
        """Sends the other workers what this one knows; rejects what failed.

        `numbers` are this worker's own, of which all learn the sums. All give
        the same names and lengths.
        """
        mine = self._no_news()
        mine[0] = self.chiefs([each.newest for each in self._followers])
        for index, each in enumerate(self._followers):
            state = each.state
            mine[1, index] = state == follower.READY
            mine[2, index] = state == follower.FAILED
        (newest, ready, failed), sums = self._summed(mine, **numbers)
        for index in map(int, np.flatnonzero(failed)):
            self._reject(index)
        return News(
            newest=newest.tolist(),
            ready=[int(i) for i in np.flatnonzero(ready == self._num_workers)],
            failed=[int(i) for i in np.flatnonzero(failed)],
            sums=sums,
        )

    def announce(self, newest: Sequence[int]) -> None:
        """Makes all workers read the newest versions, if none is under way.

        `newest` are of the news. All workers have taken the same since, and
        have rejected the same, so all announce the same.
        """
        for step, each in zip(newest, self._followers, strict=True):
            is_good = step not in each.rejected and step > each.current
            if is_good and each.announced < 0:
                each.announce(step)

    def confirm(self, reasons: Mapping[int, str | None]) -> list[int]:
        """Agrees which staged versions every worker can use; rejects others.

        `reasons` say, by the index of the follower, why this worker cannot;
        None if it can. All workers give the same followers.
        """
        mine = self._no_news()
        for index, reason in reasons.items():
            mine[2, index] = reason is not None
        summed, _ = self._summed(mine)
        for index in map(int, np.flatnonzero(summed[2])):
            self._reject(index, reasons.get(index))
        return [index for index in reasons if not summed[2, index]]

    def read(self, wanted: Mapping[int, int]) -> list[int]:
        """Makes every worker read the versions that the chief wants.

        By the index of the follower. It waits for the reads, so it is for the
        time before training. Returns the followers whose version every worker
        has read.
        """
        mine = self._no_news()
        every = range(len(self._followers))
        mine[0] = self.chiefs([wanted.get(index, -1) for index in every])
        summed, _ = self._summed(mine)
        asked = {i: s for i, s in enumerate(summed[0].tolist()) if s >= 0}
        for index, step in asked.items():
            self._followers[index].announce(step)
            _read_now(self._followers[index])
        ready = self.exchange_news().ready
        for index in set(asked).difference(ready):
            _log.warning(
                "Version %d of group %d, which was in use before, is no longer "
                "used: at least one worker couldn't read it.",
                asked[index],
                self._followers[index].group,
            )
            self._followers[index].announce(-1)
        return [index for index in asked if index in ready]

    def _reject(self, index: int, reason: str | None = None) -> None:
        each = self._followers[index]
        each.reject(each.announced, reason)

    def _no_news(self) -> np.ndarray:
        return np.zeros([_FIELDS, len(self._followers)], np.int64)

    def _summed(
        self, mine: np.ndarray, **numbers: Sequence[int]
    ) -> tuple[np.ndarray, dict[str, list[int]]]:
        own = [np.array(each, np.int64) for each in numbers.values()]
        summed = self._sum(np.concatenate([mine.ravel(), *own]))
        ends = np.cumsum([mine.size, *map(len, own)])
        of_followers, *sums, _ = np.split(summed, ends)
        by_name = zip(numbers, (part.tolist() for part in sums), strict=True)
        return of_followers.reshape(mine.shape), dict(by_name)


def _read_now(each: follower.Follower) -> None:
    """Reads what was announced, here and now."""
    deadline = time.monotonic() + _READ_TIMEOUT_SECS
    while True:
        each.stage()
        is_over = each.is_absent or time.monotonic() > deadline
        if each.state != follower.PENDING or is_over:
            return
        time.sleep(_RETRY_SECS)
