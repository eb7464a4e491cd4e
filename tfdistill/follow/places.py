"""Which other groups could take the place of one that is followed.

A follower looks at its own group only, and of all the others one is looked at
now and then: the calls to the exchange grow with the groups that are followed.
"""

import contextlib
import itertools
from collections.abc import Sequence

from tfdistill.exchange import publisher
from tfdistill.follow import follower

# Between two looks at another group.
_ROUNDS = 8


class Places:
    """Groups of which some are followed. A background thread may share it.

    Attributes:
        groups: All of them.
        followers: Followers of the groups that are followed.
    """

    def __init__(
        self, exchange: publisher.Exchange, groups: Sequence[int]
    ) -> None:
        """Touches no storage."""
        self.groups = groups
        self.followers: list[follower.Follower] = []
        self._exchange = exchange
        self._rounds, self._turns = itertools.count(1), itertools.cycle(groups)
        # The newest version of each group, and of each that published between
        # two looks: the others may be gone.
        self._newest: dict[int, int] = {}
        self._alive: dict[int, int] = {}

    def move(self, place: follower.Follower, group: int) -> None:
        """Makes a place follow a group, swapping with a place that did."""
        for other in self.followers:
            if other.group == group:
                other.follow(place.group)
        place.follow(group)

    def look(self) -> None:
        """Looks at one group that is not followed, if it is time for that."""
        others = {*self.groups} - {each.group for each in self.followers}
        if next(self._rounds) % _ROUNDS or not others:
            return
        group = next(group for group in self._turns if group in others)
        self._alive.pop(group, None)
        # A place that cannot be looked at isn't better.
        with contextlib.suppress(OSError):
            newest = max(self._exchange.listed(group), default=-1)
            if newest > self._newest.get(group, newest):
                self._alive[group] = newest
            self._newest[group] = newest

    def best(self, *, newer_than: float) -> int:
        """Returns, once, the group that is furthest beyond a step, or -1."""
        followed = {each.group for each in self.followers}
        steps = {g: s for g, s in [*self._alive.items()] if g not in followed}
        group = max(steps, key=steps.__getitem__, default=-1)
        if steps.get(group, -1) <= newer_than:
            return -1
        del self._alive[group]
        return group
