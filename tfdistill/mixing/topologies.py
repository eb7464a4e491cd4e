"""Who mixes with whom at the n-th mix; every group finds the same answer.

Each answer is mutual: if a mixes with b, then b with a. With equal weights
for all that take part, the matrices of "all", "ring" and "gossip" are then
doubly stochastic, so that mixing keeps the mean of all groups.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

ALL, RING, GOSSIP = "all", "ring", "gossip"
NAMES = (ALL, RING, GOSSIP)


class Topology:
    """The peers of one group, mix by mix."""

    def __init__(
        self,
        peers: str | Sequence[int],
        *,
        group: int,
        num_groups: int,
        seed: int = 0,
    ) -> None:
        """Finds all groups that can be peers, `everyone`.

        Args:
            peers: `"all"`; `"ring"`, the groups before and after this one;
                `"gossip"`, another group for each mix, or nobody for one group
                if their number is odd; or group indices.
            group: This group's index.
            num_groups: Of the run. A list of peers does without it.
            seed: Of the pairs of `"gossip"`, the same in all groups.

        Raises:
            ValueError: `peers` is none of these, or there is nobody.
        """
        self._kind = check_peers(peers)
        self._group, self._num_groups, self._seed = group, num_groups, seed
        if isinstance(self._kind, tuple):
            found = self._kind
        elif self._kind == RING:
            found = tuple({(group - 1) % num_groups, (group + 1) % num_groups})
        else:
            found = tuple(range(num_groups))
        self.everyone = tuple(sorted(g for g in found if g != group))
        if not self.everyone:
            raise ValueError(
                "A mixing.WeightMixer needs another group to mix with; "
                f"received peers={peers!r} for group {group} of {num_groups}. "
                "Start more groups, or leave the mixer out."
            )

    def peers(self, number: int) -> tuple[int, ...]:
        """Returns the groups to mix with at the mix of this number.

        Example:
            >>> ring = Topology("ring", group=0, num_groups=4)
            >>> ring.peers(1)
            (1, 3)
            >>> [
            ...     Topology("gossip", group=g, num_groups=4).peers(7)
            ...     for g in range(4)
            ... ]
            [(3,), (2,), (1,), (0,)]
        """
        if self._kind != GOSSIP:
            return self.everyone
        order = np.random.default_rng([self._seed, number]).permutation(
            self._num_groups
        )
        place = int(np.flatnonzero(order == self._group)[0])
        partner = place ^ 1
        if partner >= self._num_groups:
            return ()
        return (int(order[partner]),)


def check_peers(peers: Any) -> str | tuple[int, ...]:
    """Returns a topology's name, or the groups of a list."""
    if isinstance(peers, str) and peers in NAMES:
        return peers
    if isinstance(peers, list | tuple | range):
        is_index = [
            isinstance(g, numbers.Integral) and not isinstance(g, bool)
            for g in peers
        ]
        if all(is_index) and all(g >= 0 for g in peers):
            if len(set(peers)) == len(peers):
                return tuple(int(g) for g in peers)
    raise ValueError(
        f"`peers` must be one of {NAMES}, or a list of different group "
        f"indices; received {peers!r}."
    )
