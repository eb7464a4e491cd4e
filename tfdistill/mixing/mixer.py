"""WeightMixer: a group mixes its weights with those that its peers publish."""

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.mixing import journal as journal_lib
from tfdistill.mixing import peers as peers_lib
from tfdistill.mixing import rules
from tfdistill.mixing import weights
from tfdistill.system import background
from tfdistill.training import steps

_log = logging.getLogger(__name__)


class ScheduledMixer(steps.Mixer):
    """Mixes versions of other groups at regular steps, by a rule.

    Subclasses make the weights, and name the source of what is mixed with them.

    Attributes:
        num_mixes: Mixes that took place.
        num_skipped: Mixes that were skipped because no version had been read.
        num_bytes: Bytes of the versions that were mixed.
        waits: How long the training thread waited for versions.
        blocked: How long mixing held up the training thread, waits included.
        staleness_steps: In the last mix, by how many steps the versions were
            behind this group's own, by group.
        is_over: Whether the group mixes no more; see `end`.
    """

    is_over = False

    def __init__(
        self,
        rule: rules.Rule,
        *,
        every_steps: int,
        peers: Sequence[int] | None = None,
        wait_secs: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet.

        Args:
            rule: How weights change, such as
                `tfdistill.mixing.ModelAveraging(0.5)`.
            every_steps: Steps between mixes, >= 1; a multiple of the
                exporter's.
            peers: Groups to mix with, each of which must mix with this one.
                Default: all other groups of the run. With an empty list, the
                rule treats the group's own weights as the mean, as DiLoCo with
                one replica does.
            wait_secs: The longest wait of a mix for its peers' versions of
                the same step, >= 0. Default 0: training never waits.
            clock: Seconds of a clock that never goes backwards.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        if not isinstance(rule, rules.Rule):
            raise ValueError(
                "`rule` must be one of tfdistill.mixing, such as "
                f"tfdistill.mixing.ModelAveraging(0.5); received {rule!r}."
            )
        if not 0 <= wait_secs < math.inf:
            raise ValueError(
                f"`wait_secs` must be finite and >= 0; received {wait_secs}."
            )
        self._rule, self._wait_secs, self._clock = rule, wait_secs, clock
        self._peers = None if peers is None else follower.checked_groups(peers)
        self._schedule = steps.EverySteps(every_steps)
        # When the next mix's versions are announced, if it will not wait.
        every = self._schedule.every_steps
        self._ahead = steps.EverySteps(every, offset_steps=every - every // 2)
        self._exporter: Any = None
        self._made: Any = None
        self._following: follower.Following | None = None
        self._journal = journal_lib.Journal()
        self.waits = background.WorkTimes()
        self.blocked = background.WorkTimes()
        self.forget()

    def forget(self) -> None:
        """Forgets an earlier training: this one is at step 0."""
        # The SHA-256 of the weights that the group began with, once known.
        self._began: str | None = None
        self._rounds: Any = None
        # The mean of peers' versions, by what it consists of.
        self._mean: tuple[Any, Any] = None, []
        self._followers: dict[int, follower.Follower] = {}
        self.num_mixes = self.num_skipped = self.num_bytes = self.num_waits = 0
        self.staleness_steps: dict[int, int] = {}
        self.is_over = False

    @property
    def totals(self) -> dict[str, Any]:
        """What it did so far, for logs."""
        return {
            "mixes": self.num_mixes,
            "skipped": self.num_skipped,
            "waits": self.num_waits,
            "bytes": self.num_bytes,
            "versions": {
                str(g): each.current for g, each in self._followers.items()
            },
        }

    @property
    def described(self) -> dict[str, Any]:
        """The extras of manifests of what is mixed; none before training."""
        if self._began is None:
            return {}
        return {
            peers_lib.RULE_FIELD: self._described_rule,
            peers_lib.INITIAL_FIELD: self._began,
        }

    @property
    def _described_rule(self) -> str:
        """What must be the same in all groups that mix."""
        return self._rule.description

    # ---- before the first step ----

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the exporter before it, whose group and exchange it uses."""
        before = list(callbacks[: list(callbacks).index(self)])
        exporters = [c for c in before if isinstance(c, steps.Exporter)]
        if not exporters:
            raise ValueError(
                "`callbacks` must have a StudentExporter before the "
                "WeightMixer: a mix needs the version that each group had "
                "before the mix; received "
                f"{[type(c).__name__ for c in callbacks]}."
            )
        self._exporter = exporters[-1]

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Starts the reading thread."""
        super().on_train_begin(logs)
        model = self.codistilled
        if self._exporter is None:
            raise self.misplaced()
        strategy = model.distribute_strategy
        if replicas.on_servers(strategy):
            raise ValueError(
                "A WeightMixer must not be used with parameter servers, where "
                f"no task has all weights; received {type(strategy).__name__}. "
                "Learn from the other groups' predictions with "
                "teachers.Peers()."
            )
        if self.mixes_versions and self._exporter.exports_averages:
            raise ValueError(
                "The StudentExporter beside a WeightMixer must publish the "
                "weights themselves; this StudentExporter publishes their "
                "moving averages. Leave out the optimizer's use_ema."
            )
        self._schedule.start(self.step)
        self._ahead.start(self.step)
        if self.step == 0:
            self._weights.start()
            self.forget()
        if self._began is None:
            self._began = self._weights.digest()
        is_chief = replicas.is_chief(strategy)
        self._find_followers(strategy)
        self._journal = journal_lib.Journal(
            model.trainer.backup, is_chief=is_chief
        )
        self._following = follower.Following(
            list(self._followers.values()),
            proposes=is_chief,
            also=self.in_background,
        )
        self._following.start()

    def _find_followers(self, strategy: tf.distribute.Strategy) -> None:
        cluster, group = strategy_lib.cluster_of(strategy), self._exporter.group
        others = [g for g in range(cluster.num_groups) if g != group]
        given = others if self._peers is None else self._peers
        groups = sorted(follower.checked_groups(given, own=group))
        if not groups and self._peers is None:
            raise ValueError(
                "A mixing.WeightMixer needs another group to mix with; "
                f"received none for group {group}. Start more groups, leave "
                "the mixer out, or pass peers=[] to disable mixing."
            )
        self._rounds = peers_lib.Rounds(
            groups,
            self._source(),
            strategy,
            wait_secs=self._wait_secs,
            is_exact=not self.mixes_versions,
            clock=self._clock,
        )
        before, self._followers = self._followers, self._rounds.followers
        for group in before.keys() & self._followers.keys():
            self._followers[group].current = before[group].current

    def _source(self) -> peers_lib.Source:
        """Returns where followers find what is mixed."""
        raise NotImplementedError

    @property
    def _weights(self) -> Any:
        """Makes `_made` again if other weights are trained; takes its time."""
        model = self.codistilled
        if self._made is None or not self._made.is_of(model.student):
            self._made = replicas.outside_scopes(self._make_weights)
        return self._made

    def _make_weights(self) -> Any:
        """Makes what `_find_mean` and `_put_in` work on."""
        raise NotImplementedError

    # ---- between steps ----

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Mixes when it is due."""
        super().on_train_batch_end(batch, logs)
        is_due = self._schedule.due(self.step)
        is_ahead = self._ahead.due(self.step)
        if self.is_over:
            return
        if is_due:
            with self.blocked.measured():
                self._when_due()
        if is_ahead and self._looks_ahead and self._followers:
            with self.blocked.measured():
                self._rounds.look_ahead()

    @property
    def _looks_ahead(self) -> bool:
        """Whether workers read before a mix what it will take."""
        return not self._wait_secs

    def _when_due(self) -> None:
        self._mix(self.step)

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Stops the reading thread."""
        if self._following is not None:
            self._following.stop()
            self._following = None

    def goes_on(self, staged: Sequence[follower.Staged]) -> bool:
        """Whether these versions are to be mixed; if not, mixing ends.

        Called on all workers before each mix, including skipped mixes, and all
        must give the same answer. Default: True.
        """
        del staged
        return True

    def end(self) -> None:
        """Ends the mixing; all workers call it at the same step."""
        self.is_over = True

    def _chosen(self, step: int) -> list[int]:
        if not self._wait_secs:
            return self._rounds.ready()
        with self.waits.measured():
            ready, has_waited = self._rounds.awaited(step)
        self.num_waits += has_waited
        return ready

    def _mix(self, step: int) -> None:
        """Mixes the versions of a step, or of earlier ones if it may."""
        if not self._followers:
            self._take([])
            return
        is_known, before = self._journal.replay(self.step)
        if is_known:
            chosen = self._rounds.repeated(before or {})
            if len(chosen) < len(before or {}):
                self._journal.warn(self.step)
        else:
            chosen = self._chosen(step)
        staged = [each for g in chosen if (each := self._followers[g].staged)]
        goes_on = self.goes_on(staged)
        if is_known:
            goes_on = before is not None
        mixed = {each.version.group: each.version.step for each in staged}
        self._journal.add(self.step, mixed if goes_on else None)
        if not goes_on:
            self.end()
        elif staged:
            self._take(staged)
        else:
            if not self.num_skipped:
                _log.warning(
                    "Step %d: no mix, because none of the groups %s has a new "
                    "version. Training continues; later skips are only "
                    "counted.",
                    self.step,
                    list(self._followers),
                )
            self.num_skipped += 1

    def _take(self, staged: Sequence[follower.Staged]) -> None:
        others = self._mean_of(staged)
        self._mean = None, []
        mixed = [each.version for each in staged]
        for version in mixed:
            self._followers[version.group].take_staged()
            self.num_bytes += version.num_bytes
        self._put_in(others, num=len(mixed))
        self.num_mixes += 1
        self.staleness_steps = {v.group: self.step - v.step for v in mixed}

    def _put_in(self, others: list[Any], *, num: int) -> None:
        """Moves the weights by what `_find_mean` returned of `num` versions."""
        raise NotImplementedError

    def _find_mean(self, staged: Sequence[follower.Staged]) -> Any:
        """Returns what a mix of these versions needs; in any thread."""
        raise NotImplementedError

    def _mean_of(self, staged: Sequence[follower.Staged]) -> Any:
        key = [(each.version.group, each.version.step) for each in staged]
        known = self._mean
        if known[0] != key:
            known = self._mean = key, self._find_mean(staged)
        return known[1]

    def in_background(self) -> None:
        """Called on the reading thread, time and again.

        Finds the mean before a mix needs it.
        """
        staged = [s for f in self._followers.values() if (s := f.staged)]
        if staged:
            self._mean_of(staged)

    # ---- for a backup ----

    @property
    def variables(self) -> list[tf.Variable]:
        """The rule's state, and what else the weights keep."""
        found: list[tf.Variable] = self._weights.variables
        return found

    def state(self) -> dict[str, Any]:
        """Returns what else a resumed training continues with."""
        return {
            "initial_weights": self._began,
            "is_over": self.is_over,
            **self.totals,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._began = state["initial_weights"]
        self.num_mixes, self.num_skipped = state["mixes"], state["skipped"]
        self.num_bytes, self.num_waits = state["bytes"], state["waits"]
        for group, step in state["versions"].items():
            if int(group) in self._followers:
                self._followers[int(group)].current = step
        if state["is_over"]:
            self.end()


class WeightMixer(ScheduledMixer):
    """Mixes the weights with other groups' weights at regular steps.

    Groups publish versions as for codistillation, by a `StudentExporter` that
    comes before it among the callbacks, and read each other's in the
    background, with the same checks. All workers of a group mix the same
    versions at the same step, and no version twice. Weights that are trained
    change by the rule; `tfdistill.mixing.rules` says what becomes of all
    others. All groups must begin with equal weights and mix by the same rule;
    other versions are refused.

    By default training never waits: a mix takes the versions that have been
    read, and is skipped if there are none. With `wait_secs` it waits until all
    peers have published their version of the same step, so that the result does
    not depend on the groups' speeds. A peer that was missing then is not waited
    for again until it publishes.

    Example:
        >>> from tfdistill import mixing
        >>> mixer = mixing.WeightMixer(
        ...     mixing.ModelAveraging(0.5), every_steps=100
        ... )
    """

    def manifest_extras(self) -> dict[str, Any]:
        """Returns the manifests' extras for groups that mix the versions."""
        return self.described

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the exporter before it, which must publish for each mix."""
        super().meet(callbacks)
        every, found = self._schedule.every_steps, self._exporter
        if every % found.every_steps or found.offset_steps:
            raise ValueError(
                "`every_steps` of the WeightMixer must be a multiple of the "
                f"StudentExporter's, which has no `offset_steps`; received "
                f"{every} beside {found.every_steps} and {found.offset_steps}. "
                "Groups mix versions of the same step."
            )

    def _source(self) -> peers_lib.Source:
        exporter, graph = self._exporter, self.codistilled.graph
        expected = saved_model.SavedModelWriter(graph).variables

        def screen(version: versions.Version) -> None:
            screen_lib.check(
                version,
                specs=graph,
                schema=exporter.schema,
                only_own="Its weights mean something else. Train the same "
                "model in each group that mixes.",
            )
            peers_lib.check_origin(version, self.described)

        return peers_lib.Source(
            exporter.exchange,
            lambda version: saved_model.read_variables(version.path, expected),
            screen,
            exporter.ensure_published,
        )

    def _make_weights(self) -> Any:
        model = self.codistilled
        return weights.MixedWeights(
            model.student,
            model.graph,
            model.distribute_strategy,
            self._rule,
        )

    def _find_mean(self, staged: Sequence[follower.Staged]) -> Any:
        return self._made.mean_of([each.values for each in staged])

    def _put_in(self, others: list[Any], *, num: int) -> None:
        self._made.mix(others, num=num)
