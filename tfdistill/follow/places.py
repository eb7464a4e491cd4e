"""Which of many groups a few places follow: chosen by the chief, for a reason.

A place looks at the group that it follows and at no other. Of all the others
one is looked at now and then, in turn. So the calls to the exchange grow with
the places and hardly with the groups, and whoever is found has just published.
"""

import collections
import contextlib
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import publisher
from tfdistill.follow import follower as follower_lib

# Between two looks at other groups, while every place is content.
_ROUNDS = 8


class Places:
    """The followers of some of the groups, which others may replace.

    A version of another group is proposed in place of the newest of the one
    that is followed, by the same proposal, so that all workers take it at the
    same step; until all have read it, nothing changes.

    Attributes:
        groups: All that may be followed. At first, the followers have the
            first of them.
        followers: One for each place.
    """

    def __init__(
        self, exchange: publisher.Exchange, groups: Sequence[int]
    ) -> None:
        """Touches no storage."""
        self.groups = groups
        self.followers: list[follower_lib.Follower] = []
        self._exchange = exchange
        self._turns = collections.deque(groups)
        self._num_looks = 0
        # By group, the newest version that was considered.
        self._seen: dict[int, int] = {}

    def add(self, follower: follower_lib.Follower) -> None:
        """Adds a place."""
        self.followers.append(follower)
        follower.look_further = self.look

    def state(self) -> dict[str, list[int]]:
        """Returns the group that each place follows, for a backup."""
        return {"following": [each.group for each in self.followers]}

    def recall(
        self, follower: follower_lib.Follower, state: Mapping[str, Any]
    ) -> bool:
        """Has a place follow what it did; returns whether the state fits.

        That of other options does not.
        """
        groups = state.get("following", ())
        fits = len(groups) == len(self.followers)
        if fits and set(groups).issubset(self.groups):
            follower.follow(groups[self.followers.index(follower)])
            return True
        return False

    def look(self) -> None:
        """Looks at another group, if a place could be better filled.

        Each follower calls it after each look of its own, in one thread.
        """
        self._num_looks += 1
        place = min(self.followers, key=lambda each: each.yields_after)
        rounds = 1 if place.yields_after < 0 else _ROUNDS
        is_due = self._num_looks % (rounds * len(self.followers)) == 0
        if not is_due or place.yields_after == math.inf:
            return
        taken = set().union(*(each.groups for each in self.followers))
        others = [group for group in self._turns if group not in taken]
        if others and len(place.groups) == 1:
            # What cannot be looked at is no better.
            with contextlib.suppress(OSError):
                self._consider(others[0], place)
            self._turns.remove(others[0])
            self._turns.append(others[0])

    def _consider(self, group: int, place: follower_lib.Follower) -> None:
        """Proposes what a group has published since it was last considered.

        A group that has published nothing since then may be gone.
        """
        bound = int(max(place.yields_after, self._seen.get(group, -1)))
        found = self._exchange.latest(
            group, newer_than=bound, wanted=place.is_usable
        )
        if found is not None and group in self._seen:
            place.propose(found)
        if found is not None or bound < 0:
            self._seen[group] = -1 if found is None else found.step
