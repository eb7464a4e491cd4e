"""What the workers of a group agree on about versions, by one collective.

The chief proposes, each worker says what it has read, and after the sum all
know the same: so all announce, reject and take the same versions at the same
step.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
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


def _collective_sum(
    strategy: tf.distribute.Strategy, size: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Makes one small collective: sums workers' int64 vectors of a size."""
    num_local = replicas.num_local(strategy)

    def in_replica(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        first = context.replica_id_in_sync_group % num_local == 0
        own = tf.where(first, values, tf.zeros_like(values))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    @tf.function(
        input_signature=[tf.TensorSpec([size], tf.int64)], autograph=False
    )
    def summed(values: tf.Tensor) -> tf.Tensor:
        return strategy.run(in_replica, args=(values,))

    def sum_over_group(values: np.ndarray) -> np.ndarray:
        result = summed(tf.constant(values, tf.int64))
        return strategy.experimental_local_results(result)[0].numpy()

    return sum_over_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What all workers know after a collective; followers by their index.

    Attributes:
        newest: For each follower, the newest version that could be used, -1
            for none.
        ready: Followers whose announced version every worker has read.
        failed: Followers whose announced version some worker could not read,
            and which all have rejected.
        said: The sums of the workers' own numbers, by their names.
    """

    newest: Sequence[int]
    ready: Sequence[int]
    failed: Sequence[int]
    said: Mapping[str, Sequence[int]]


class Agreement:
    """Moves the followers of all workers alike; all call at the same step."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        followers: Sequence[follower.Follower],
        **said: int,
    ) -> None:
        """Takes the followers, in the same order on all workers.

        `said` are the names of the workers' own numbers, and how many there
        are of each.
        """
        self._followers = followers
        size = _FIELDS * len(followers) + sum(said.values())
        self._sum = (
            (lambda values: values)
            if replicas.num_workers(strategy) == 1
            else _collective_sum(strategy, size)
        )
        self._num_workers = replicas.num_workers(strategy)
        self._is_chief = replicas.is_chief(strategy)
        self._said = said

    def exchange_news(self, **said: Sequence[int]) -> News:
        """Sends the other workers what this one knows; rejects what failed.

        `said` are this worker's own numbers, 0 by default, of which all learn
        the sums.
        """
        mine = self._no_news()
        for index, each in enumerate(self._followers):
            state = each.state
            mine[0, index] = (each.newest + 1) * self._is_chief
            mine[1, index] = state == follower.READY
            mine[2, index] = state == follower.FAILED
        (newest, ready, failed), sums = self._summed(mine, **said)
        for index in map(int, np.flatnonzero(failed)):
            self._reject(index)
        return News(
            newest=[int(step) - 1 for step in newest],
            ready=[int(i) for i in np.flatnonzero(ready == self._num_workers)],
            failed=[int(i) for i in np.flatnonzero(failed)],
            said=sums,
        )

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
        for index, step in wanted.items():
            mine[0, index] = (step + 1) * self._is_chief
        summed, _ = self._summed(mine)
        asked = {i: int(s) - 1 for i, s in enumerate(summed[0]) if s > 0}
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
        self, mine: np.ndarray, **said: Sequence[int]
    ) -> tuple[np.ndarray, dict[str, list[int]]]:
        own = [*mine.flat]
        for name, number in self._said.items():
            own += said.get(name, [0] * number)
        summed = self._sum(np.array(own, np.int64))
        ends = np.cumsum([mine.size, *self._said.values()])
        of_followers, *sums, _ = np.split(summed, ends)
        by_name = zip(self._said, (part.tolist() for part in sums), strict=True)
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
