"""The peers' versions: whose are read, and which of them a mix takes.

In each round all workers of a group exchange a few numbers by one small
collective, after which all know the same of each peer. So they all draw the
same conclusions.
"""

import math
import numbers
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.mixing import weights
from tfdistill.system import background

# Of a manifest's `extras`: the SHA-256 of the weights at step 0, and the rule
# by which the group mixes.
INITIAL_FIELD, RULE_FIELD = "initial_weights", "mixing_rule"
_NAMES = ALL, RING, GOSSIP = "all", "ring", "gossip"
# Between two rounds of a mix that waits.
_PAUSE_SECS = 0.005


def check_peers(peers: Any) -> None:
    """Checks that peers are a name, or a list of different groups."""
    if peers in _NAMES:
        return
    if isinstance(peers, list | tuple | range):
        is_group = [type(g) is int and g >= 0 for g in peers]
        if all(is_group) and len(set(peers)) == len(peers):
            return
    raise ValueError(
        f"`peers` must be one of {_NAMES}, or a list of different group "
        f"indices; received {peers!r}."
    )


class Partners:
    """Whom a group mixes with at the n-th mix; all groups find the same.

    Mutual for a name: if a mixes with b, then b with a. With equal weights the
    matrices are then doubly stochastic: mixing keeps the mean of all groups.
    """

    def __init__(
        self,
        peers: str | Sequence[int],
        *,
        group: int,
        num_groups: int,
        seed: int = 0,
    ) -> None:
        """Finds all that a group can mix with; ValueError if there is nobody.

        A list does without the number of groups. `seed` draws the pairs of
        `"gossip"`.
        """
        self._peers, self._seed = peers, seed
        self._group, self._num_groups = group, num_groups
        found: Collection[int] = range(num_groups)
        if peers == RING:
            found = {(group - 1) % num_groups, (group + 1) % num_groups}
        elif peers not in _NAMES:
            found = [int(peer) for peer in peers]
        # Ascending.
        self.everyone = sorted(g for g in found if g != group)
        if not self.everyone:
            raise ValueError(
                "A mixing.WeightMixer needs another group to mix with; "
                f"received peers={peers!r} for group {group} of {num_groups}. "
                "Start more groups, or leave the mixer out."
            )

    def at(self, number: int) -> list[int]:
        """Returns the groups to mix with at the mix of this number.

        Example:
            >>> [
            ...     Partners("gossip", group=g, num_groups=4).at(7)
            ...     for g in range(4)
            ... ]
            [[3], [2], [1], [0]]
        """
        if self._peers != GOSSIP:
            return self.everyone
        generator = np.random.default_rng([self._seed, number])
        order = generator.permutation(self._num_groups).tolist()
        place = order.index(self._group) ^ 1
        # One of an odd number is left over.
        return order[place : place + 1]


class Origin:
    """The weights that a group began with, and peers that began with others.

    Attributes:
        rule: What this group mixes by.
        weights: The SHA-256 of this group's weights at step 0, if known.
        strangers: By group, that of those which began with others.
    """

    def __init__(self, rule: str) -> None:
        """Knows of nothing else yet."""
        self.rule = rule
        self.weights: str | None = None
        self.strangers: dict[int, str] = {}

    def check(self, version: versions.Version) -> None:
        """Raises `Refused` for versions of another origin."""
        theirs = version.manifest.extras.get(INITIAL_FIELD)
        if not isinstance(theirs, str):
            raise screen_lib.Refused(
                "its manifest does not say which weights its group began "
                "with. Give each group's `fit` a tfdistill.mixing.WeightMixer."
            )
        if theirs != self.weights:
            self.strangers[version.group] = theirs
            raise screen_lib.Refused("its group began with other weights.")
        rule = version.manifest.extras.get(RULE_FIELD, self.rule)
        if rule != self.rule:
            raise screen_lib.Refused(
                f"its group mixes by {rule!s:.200}, and this one by "
                f"{self.rule}. Give the WeightMixers of all groups one rule."
            )

    def refuse(self, groups: Collection[int]) -> None:
        """Ends training if any worker found that these groups are strangers."""
        if not groups:
            return
        theirs = [
            f"{self.strangers.get(group, 'another')} in group {group}"
            for group in groups
        ]
        raise RuntimeError(
            "All groups that mix their weights must begin with equal ones; "
            f"received {self.weights} in this group and {', '.join(theirs)}. "
            "Call keras.utils.set_random_seed with the same number in all "
            "groups before the model is built, and use a new exchange "
            "directory for a new run."
        )


def followers_of(
    exporter: Any,
    groups: Sequence[int],
    graph: student_graph.StudentGraph,
    mixed: weights.MixedWeights,
    origin: Origin,
    *,
    on_servers: bool,
) -> dict[int, follower.Follower]:
    """Returns followers of the weights that are mixed, by group.

    They read where the `exporter` of this group publishes.
    """
    expected = saved_model.SavedModelWriter(graph).variables
    keys = [list(expected)[index] for index in mixed.indices]
    same_graph = screen_lib.refuse_other_graphs(
        graph,
        "Its weights mean something else. Train the same model in each group "
        "that mixes.",
    )

    def check(version: versions.Version) -> None:
        same_graph(version)
        origin.check(version)

    def read(version: versions.Version) -> Any:
        if not on_servers:
            return saved_model.read_variables(version.path, expected)
        # A table may not fit into this process.
        values = saved_model.read_variables(version.path, expected, only=keys)
        return dict(zip(mixed.indices, values, strict=True))

    screen = screen_lib.Screen(graph, schema=exporter.schema, also=check)
    return {
        group: follower.Follower(
            exporter.exchange, group, read=read, screen=screen, alone=False
        )
        for group in groups
    }


class Quorum:
    """Chooses the versions of each mix, the same on all workers.

    Attributes:
        num_waits: Mixes that had to wait.
        waits: How long the training thread waited.
    """

    def __init__(
        self,
        quorum: int | str,
        *,
        grace_secs: float,
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
        self._quorum, self._grace_secs = quorum, grace_secs
        self._clock = clock
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
        origin: Origin,
        exporter: Any,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Takes what a training has: the same followers on all workers."""
        self._followers, self._origin = followers, origin
        self._exporter, self._groups = exporter, list(followers)
        self._is_chief = replicas.is_chief(strategy)
        self._agreement = agreement.among(
            strategy, list(followers.values()), num_said=len(followers) + 1
        )

    def look_ahead(self, now: Sequence[int], later: Sequence[int]) -> None:
        """Has all workers read what the next mix, with `later`, will take.

        `now` are the peers of the mix before it.
        """
        news, _ = self._heard()
        self._announce(news, later)
        # What was read too late for an earlier pair makes room.
        self._announce(news, set(later).difference(now), replace=True)

    def chosen(self, step: int, groups: Sequence[int]) -> list[int]:
        """Returns the peers to mix with; every worker has read from them."""
        need = len(groups)
        if self._quorum != "all":
            need = int(self._quorum)
        if self.looks_ahead:
            ready = self._ready(self._heard()[0]).intersection(groups)
        else:
            with self.waits.measured():
                ready = self._awaited(step, groups, need)
        return sorted(ready) if len(ready) >= need else []

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

    def _heard(self, *, is_over: bool = False) -> tuple[agreement.News, bool]:
        """Tells the others what this worker knows; rejects what failed.

        Returns what all know then, and what the chief said by `is_over`.
        RuntimeError if any worker found a group that began with other weights.
        """
        strange = [group in self._origin.strangers for group in self._groups]
        is_over = is_over and self._is_chief
        news = self._agreement.exchange_news([*strange, is_over])
        *found, over = map(bool, news.said)
        self._origin.refuse(
            [g for g, is_so in zip(self._groups, found, strict=True) if is_so]
        )
        return news, over

    def _ready(self, news: agreement.News) -> set[int]:
        """Groups whose announced version every worker has read."""
        return {self._groups[index] for index in news.ready}

    def _announce(
        self,
        news: agreement.News,
        groups: Collection[int],
        *,
        replace: bool = False,
    ) -> None:
        """Has every worker read the newest versions of these groups.

        With `replace`, also where another version was announced before.
        """
        for index, (group, step) in enumerate(
            zip(self._groups, news.newest, strict=True)
        ):
            if group not in groups or index in news.failed:
                continue
            each = self._followers[group]
            is_free = replace or each.announced < 0
            if is_free and step >= 0 and each.announced != step:
                each.announce(step)

    def _awaited(self, step: int, groups: Sequence[int], need: int) -> set[int]:
        """Waits for versions of this step, while there is hope and time."""
        for group in groups:
            self._followers[group].limit = step
        deadline = self._clock() + self._grace_secs
        self._exporter.ensure_published(self._grace_secs)
        num_rounds = 0
        while True:
            news, is_over = self._heard(is_over=self._clock() >= deadline)
            num_rounds += 1
            newest = dict(zip(self._groups, news.newest, strict=True))
            ready = self._ready(news).intersection(groups)
            exact = {g for g in ready if self._followers[g].announced == step}
            for index in news.failed:
                group = self._groups[index]
                self._missed[group] = newest[group]
            alive = {
                group
                for group in groups
                if newest[group] > self._missed.get(group, -2)
            }
            if len(exact) >= need or alive <= exact:
                break
            if is_over or len(alive | ready) < need:
                break
            self._announce(news, groups, replace=True)
            time.sleep(_PAUSE_SECS)
        self.num_waits += num_rounds > 1
        if len(exact) >= need:
            return exact
        for group in alive - exact:
            self._missed[group] = newest[group]
        return ready
