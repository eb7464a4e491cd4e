"""What the workers of a group agree on before a mix: which versions, and when.

In each round all workers exchange a few numbers by one small collective, after
which all know the same of each peer. So they all draw the same conclusions.
"""

import dataclasses
from collections.abc import Collection
from collections.abc import Mapping

import numpy as np

from tfdistill.teachers import agreement
from tfdistill.teachers import peer

# Of each peer: the newest version in sight of the chief; whether this worker
# has read the one that was announced, or failed to; whether it began with
# other weights. Besides, whether the chief waits no longer, and whether it
# wants mixing to end.
_FIELDS = 4


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
        strangers: Groups that began with other weights.
        is_over: Whether the time to wait is over.
        ends: Whether the group mixes no more.
    """

    newest: Mapping[int, int]
    ready: Mapping[int, int]
    failed: Collection[int]
    strangers: Collection[int]
    is_over: bool
    ends: bool


class Rounds:
    """Moves the readers of all workers alike; all call at the same step."""

    def __init__(
        self,
        readers: Mapping[int, peer.PeerReader],
        sum_over_group: agreement.Sum,
        *,
        num_workers: int,
        is_chief: bool,
    ) -> None:
        """Takes the readers by group, the same groups on all workers."""
        self._readers = readers
        self._sum = sum_over_group
        self._num_workers = num_workers
        self._is_chief = is_chief

    def exchange_news(
        self,
        *,
        is_over: bool = False,
        ends: bool = False,
        strangers: Collection[int] = (),
    ) -> News:
        """Tells the others what this worker knows; rejects what failed.

        `is_over` and `ends` count on the chief, `strangers` on every worker.
        """
        news = np.zeros([_FIELDS, len(self._readers)], np.int64)
        for index, (group, reader) in enumerate(self._readers.items()):
            state = reader.state
            news[0, index] = (reader.newest + 1) * self._is_chief
            news[1, index] = state == peer.READY
            news[2, index] = state == peer.FAILED
            news[3, index] = group in strangers
        flags = np.array([is_over, ends], np.int64) * self._is_chief
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
        return News(
            **found,
            failed=[names[i] for i in np.flatnonzero(failed)],
            strangers=[names[i] for i in np.flatnonzero(strange)],
            is_over=bool(summed[-2]),
            ends=bool(summed[-1]),
        )

    def announce(self, versions: Mapping[int, int]) -> None:
        """Has every worker read these versions, by group."""
        for group, step in versions.items():
            reader = self._readers[group]
            if step >= 0 and reader.announced != step:
                reader.announce(step)
