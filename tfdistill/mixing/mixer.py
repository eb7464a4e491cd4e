"""WeightMixer: a group mixes its weights with those that its peers publish."""

import logging
import math
import numbers
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import schedules
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.mixing import barrier
from tfdistill.mixing import journal
from tfdistill.mixing import rounds
from tfdistill.mixing import rules
from tfdistill.mixing import topologies
from tfdistill.mixing import weights
from tfdistill.system import background
from tfdistill.system import fresh_copies
from tfdistill.teachers import agreement
from tfdistill.teachers import gates
from tfdistill.teachers import peer
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# Of a manifest's `extras`: the SHA-256 of the weights at step 0.
INITIAL_FIELD = "initial_weights"
GROUPS, UPDATES, EXAMPLES = "groups", "updates", "examples"
_WEIGHINGS = (GROUPS, UPDATES, EXAMPLES)
# Between two rounds of a mix that waits.
_PAUSE_SECS = 0.005
# The longest wait for a version that a mix is to be repeated with.
_REPLAY_SECS = 60.0


class WeightMixer(fresh_copies.FreshCopies, steps.SteppedCallback):
    """Mixes the weights with those of other groups every so many steps.

    Groups publish versions as for codistillation, by a `StudentExporter` that
    comes before it among the callbacks, and read each other's in the
    background, with the same checks. All workers of a group mix the same
    versions at the same step, and no version twice. Weights that are trained
    change by the rule; `tfdistill.mixing` says what becomes of all others.
    All groups must begin with equal weights.

    By default training never waits: a mix takes what has been read, and is
    skipped if that is less than the quorum. With `grace_secs` it waits until a
    quorum has versions of its own step; with the quorum `"all"` the result no
    longer depends on the groups' speeds. A peer that was missing then is not
    waited for again until it publishes.

    Attributes:
        num_mixes, num_skipped, num_waits: Mixes that took place, that lacked
            their quorum, and that had to wait.
        num_bytes: Bytes of the versions that were mixed.
        staleness_steps: Of the last mix: by how many steps the versions were
            behind this group's own, by group.
    """

    # By which other callbacks find it.
    mixes_weights = True

    def __init__(
        self,
        exchange: publisher.Exchange,
        rule: rules.Rule,
        *,
        every_steps: int,
        peers: str | Sequence[int] | None = None,
        quorum: int | str = 1,
        grace_secs: float = 0.0,
        weigh_by: str = GROUPS,
        max_staleness_steps: int | None = None,
        max_staleness_examples: float | None = None,
        seed: int = 0,
        until: schedules.MergeBarrier | None = None,
        schema: Mapping[str, Any] | None = None,
        poll_secs: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where the groups publish.
            rule: How weights change, such as
                `tfdistill.mixing.ModelAveraging(0.5)`.
            every_steps: Steps between mixes, >= 1; a multiple of the
                exporter's.
            peers: With whom: `"all"` (default), all other groups; `"ring"`,
                the groups before and after this one; `"gossip"`, pairs that
                are drawn anew for each mix; or a list of groups. Lists must
                be mutual.
            quorum: How many peers must have a version that was not mixed
                before, >= 1, or `"all"` of those whose turn it is. With fewer
                the mix is left out. Default 1.
            grace_secs: The longest wait of a mix for the quorum, >= 0.
                Default 0: training never waits.
            weigh_by: What a version counts in the mean: `"groups"` (default),
                all the same; `"updates"` or `"examples"`, as many as its
                group has trained on since this group and that one last mixed.
            max_staleness_steps: Versions that are more of this group's steps
                old are not mixed. Default: no bound.
            max_staleness_examples: Likewise, in examples that this group has
                trained on beyond those of the version's group: for groups of
                different batch sizes or speeds. Default: no bound.
            seed: Draws the pairs of `"gossip"`, the same in all groups.
            until: What ends the mixing; the distillation weight that `compile`
                was given is the same object. Default: it goes on to the end.
            schema: What peers' labels, vocabularies and columns must be; see
                `gates.digests`. Default: nothing is compared.
            poll_secs: Seconds between two looks at the exchange. Default 0.1.
            clock: Seconds of a clock that never goes backwards.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        publisher.check_exchange(exchange)
        rules.check_rule(rule)
        _check_wait(quorum, grace_secs)
        if weigh_by not in _WEIGHINGS:
            raise ValueError(
                f"`weigh_by` must be one of {_WEIGHINGS}; received "
                f"{weigh_by!r}."
            )
        if until is not None and not isinstance(until, schedules.MergeBarrier):
            raise ValueError(
                "`until` must be a tfdistill.schedules.MergeBarrier or None; "
                f"received {until!r}."
            )
        self._bounds = {
            "steps": max_staleness_steps,
            "examples": max_staleness_examples,
        }
        for unit, most in self._bounds.items():
            if most is not None and not 0 <= most < math.inf:
                raise ValueError(
                    f"`max_staleness_{unit}` must be >= 0 or None; received "
                    f"{most}."
                )
        topologies.check_peers(topologies.ALL if peers is None else peers)
        self._exchange, self._rule = exchange, rule
        self._schedule = steps.EverySteps(every_steps)
        # When the next mix's versions are announced, if it will not wait.
        every = self._schedule.every_steps
        self._ahead = steps.EverySteps(every, offset_steps=every - every // 2)
        self._given_peers, self._seed = peers, seed
        self._quorum, self._grace_secs = quorum, grace_secs
        self._weigh_by = weigh_by
        self._until = until
        self._watch: barrier.BarrierWatch | None = None
        # Whether the chief has found that mixing is to end.
        self._is_to_end = False
        self._schema = gates.digests(schema or {})
        self._poll_secs, self._clock = poll_secs, clock
        self._exporter: Any = None
        self._made: weights.MixedWeights | None = None
        self._readers: dict[int, peer.PeerReader] = {}
        self._poller: peer.Poller | None = None
        self._journal = journal.Journal(None)
        self.initial_weights: str | None = None
        # By group, the weights that it began with, if they were others.
        self._strangers: dict[int, str] = {}
        # By group, the newest version in sight when it was missing.
        self._missed: dict[int, int] = {}
        # By group, the updates or examples of its version that was mixed last,
        # and this group's own then.
        self._counted: dict[int, tuple[float, float]] = {}
        # The mean of what has been read, by what it consists of.
        self._reduced: tuple[Any, list[tf.Tensor]] | None = None
        # Mixes left out in a row, and how many there are when the log says so.
        self._num_short, self._next_told = 0, 1
        self.num_mixes = self.num_skipped = self.num_waits = 0
        self.num_bytes = 0
        self.staleness_steps: dict[int, int] = {}
        # On the training thread: all of it, and the part that is a wait.
        self.blocked = background.WorkTimes()
        self.waits = background.WorkTimes()

    @property
    def is_in_use(self) -> bool:
        """Whether `fit` is running with it."""
        return self._poller is not None

    @property
    def totals(self) -> dict[str, Any]:
        """What it did so far, for logs."""
        return {
            "mixes": self.num_mixes,
            "skipped": self.num_skipped,
            "waits": self.num_waits,
            "bytes": self.num_bytes,
            "versions": {
                str(group): reader.current
                for group, reader in self._readers.items()
            },
        }

    @property
    def has_mean(self) -> bool:
        """Whether versions have been read, and reduced to their mean."""
        return self._reduced is not None

    @property
    def manifest_extras(self) -> dict[str, Any]:
        """What versions say to those who mix them."""
        known = self.initial_weights
        found: dict[str, Any] = {} if known is None else {INITIAL_FIELD: known}
        if self._is_over:
            found[barrier.OPEN_FIELD] = True
        return found

    @property
    def _is_over(self) -> bool:
        """Whether the groups mix no more."""
        return self._until is not None and self._until.is_open

    # ---- before the first step ----

    def observe(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the exporter; `CodistillModel.fit` calls it.

        Args:
            callbacks: All of the training.

        Raises:
            ValueError: There is none, or it comes later or does not publish
                at the steps of the mixes.
        """
        before = list(callbacks[: list(callbacks).index(self)])
        found = steps.marked(before, "exports_student")
        if not found:
            raise ValueError(
                "`callbacks` must have a tfdistill.StudentExporter before the "
                "WeightMixer: a mix needs what each group had before it; "
                f"received {[type(c).__name__ for c in callbacks]}. Pass "
                "[tfdistill.StudentExporter(exchange, every_steps=...), "
                "tfdistill.WeightMixer(...)]."
            )
        self._exporter = found[-1]
        every = self._schedule.every_steps
        if every % self._exporter.every_steps:
            raise ValueError(
                "`every_steps` of the WeightMixer must be a multiple of the "
                f"StudentExporter's; received {every} and "
                f"{self._exporter.every_steps}. Give both the same."
            )
        if self._exporter.offset_steps:
            raise ValueError(
                "`offset_steps` of the StudentExporter must be left out beside "
                f"a WeightMixer; received {self._exporter.offset_steps}. "
                "Groups mix versions of the same step."
            )

    def set_model(self, model: keras.Model) -> None:
        """Begins anew with another model, or one that trains other weights."""
        super().set_model(model)
        if self._made and not self._made.is_of(self.codistilled.student):
            self._made = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the reading thread."""
        super().on_train_begin(logs)
        model = self.codistilled
        if self._exporter is None:
            raise self.misplaced()
        if self._exporter.exports_averages:
            raise ValueError(
                "The StudentExporter beside a tfdistill.WeightMixer must "
                "publish the weights that are to be mixed; received one that "
                "publishes their averages. Leave out use_ema of the optimizer "
                'and weights="ema" of the exporter.'
            )
        self._schedule.start(self.step)
        self._ahead.start(self.step)
        strategy = model.distribute_strategy
        cluster = strategy_lib.cluster_of(strategy)
        self._is_chief = replicas.is_chief(strategy)
        mixed = self._weights()
        if replicas.on_servers(strategy):
            _log.warning(
                "Dense weights are mixed; tables on parameter servers are "
                "not, and stay this group's own."
            )
        if self.step == 0:
            mixed.start()
            self._forget()
        if self.initial_weights is None:
            self.initial_weights = mixed.digest()
        self._is_to_end = False
        if self._until is not None:
            self._watch = barrier.BarrierWatch.of(self._until, model)
        self._topology = topologies.Topology(
            self._given_peers,
            group=self._exporter.group,
            num_groups=cluster.num_groups,
            seed=self._seed,
        )
        self._topology.check_quorum(self._quorum)
        self._follow(self._topology.everyone, model.graph)
        num_workers = replicas.num_workers(strategy)
        self._rounds = rounds.Rounds(
            self._readers,
            _of_coordinator
            if replicas.on_servers(strategy)
            else agreement.collective_sum(
                strategy,
                lambda: tf.zeros([1], tf.int64),
                size=rounds.num_fields(len(self._readers)),
            ),
            num_workers=num_workers,
            is_chief=self._is_chief,
        )
        self._journal = journal.Journal.beside(
            model.trainer.backup,
            worker=0 if self._is_chief else cluster.task_index,
        )
        self._poller = peer.Poller(
            list(self._readers.values()),
            self._is_chief,
            self._poll_secs,
            also=self._in_background,
        )
        self._poller.start()

    def _weights(self) -> weights.MixedWeights:
        if self._made is None:
            model = self.codistilled
            self._made = weights.MixedWeights(
                model.student,
                model.graph,
                model.distribute_strategy,
                self._rule,
            )
        return self._made

    def _forget(self) -> None:
        """Begins a training anew."""
        self.initial_weights = None
        if self._is_over and self._until is not None:
            self._until.close()
            self.model.make_train_function(force=True)
        self._readers.clear()
        self._missed.clear()
        self._counted.clear()
        self._strangers.clear()
        self._num_short, self._next_told = 0, 1
        self.num_mixes = self.num_skipped = self.num_waits = 0
        self.num_bytes = 0

    def _follow(self, groups: Sequence[int], graph: Any) -> None:
        """Makes a reader for each peer, or has it go on."""
        screen = gates.VersionScreen(graph, schema=self._schema)
        expected = saved_model.SavedModelWriter(graph).variables
        indices = self._weights().indices
        keys = [list(expected)[index] for index in indices]
        on_servers = replicas.on_servers(self.model.distribute_strategy)

        def check(version: versions.Version) -> None:
            screen(version)
            self._check_origin(version, graph.fingerprint)

        def read(version: versions.Version) -> Any:
            try:
                if not on_servers:
                    return saved_model.read_variables(version.path, expected)
                # A table may not fit into this process.
                values = saved_model.read_variables(
                    version.path, expected, only=keys
                )
                return dict(zip(indices, values, strict=True))
            except ValueError as error:
                raise peer.RejectedError(str(error)) from error

        before = {g: reader.current for g, reader in self._readers.items()}
        self._readers.clear()
        for group in groups:
            reader = peer.PeerReader(
                self._exchange, group, read=read, screen=check, alone=False
            )
            reader.current = before.get(group, -1)
            self._readers[group] = reader

    def _check_origin(
        self, version: versions.Version, fingerprint: str
    ) -> None:
        """Refuses versions whose weights have nothing to do with ours."""
        if version.manifest.graph_fingerprint != fingerprint:
            raise peer.RejectedError(
                "its graph differs from this group's model, so that its "
                "weights mean something else. Train the same model in each "
                "group that mixes."
            )
        theirs = version.manifest.extras.get(INITIAL_FIELD)
        if not isinstance(theirs, str):
            raise peer.RejectedError(
                "its manifest does not say which weights its group began "
                "with. Give each group's `fit` a tfdistill.WeightMixer."
            )
        if theirs != self.initial_weights:
            self._strangers[version.group] = theirs
            raise peer.RejectedError("its group began with other weights.")

    # ---- between steps ----

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Mixes when it is due."""
        super().on_train_batch_end(batch, logs)
        is_due = self._schedule.due(self.step)
        is_ahead = self._ahead.due(self.step) and not self._grace_secs
        if self._is_over or not (is_due or is_ahead):
            return
        with self.blocked.measured():
            if is_due:
                self._mix(self._peers_now())
            if is_ahead:
                self._look_ahead()

    def on_train_end(self, logs: Any = None) -> None:
        """Stops the reading thread."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        self._reduced = None

    def _peers_now(self, *, after: int = 0) -> tuple[int, ...]:
        number = self.step // self._schedule.every_steps + after
        return self._topology.peers(number)

    def _look_ahead(self) -> None:
        """Has all workers read what the next mix will take."""
        news = self._round()
        peers = self._peers_now(after=1)
        self._announce(news, peers, replace=False)
        # What has become too old makes room for a newer one; so does what was
        # read too late for an earlier pair.
        old = {g for g in news.ready if not self._is_recent(g)}
        old.update(set(peers).difference(self._peers_now()))
        self._announce(news, old.intersection(peers), replace=True)

    def _round(self, *, is_over: bool = False) -> rounds.News:
        news = self._rounds.exchange_news(
            is_over=is_over,
            ends=self._watch is not None and self._watch.losses is not None,
            strangers=self._strangers,
        )
        self._is_to_end |= news.ends
        if news.strangers:
            theirs = {
                g: self._strangers.get(g, "another") for g in news.strangers
            }
            raise RuntimeError(
                "All groups that mix their weights must begin with equal ones; "
                f"received {self.initial_weights} in group "
                f"{self._exporter.group} and "
                + ", ".join(f"{v} in group {g}" for g, v in theirs.items())
                + ". Set seed_groups_alike in the configuration, or in a "
                "script call keras.utils.set_random_seed with the same number "
                "in all groups before the model is built; and use a new "
                "exchange directory for a new run."
            )
        return news

    def _announce(
        self, news: rounds.News, groups: Collection[int], *, replace: bool
    ) -> None:
        self._rounds.announce(
            {
                group: news.newest[group]
                for group in groups
                if group not in news.failed
                and (replace or self._readers[group].announced < 0)
            }
        )

    def _mix(self, groups: tuple[int, ...]) -> None:
        if not groups:
            return  # Nobody is left over for it this time.
        chosen = self._agreed(groups)
        if self._until is not None and self._ends(chosen):
            before = self._journal.replay(self.step)
            losses = before.losses if before else None
            if self._watch and self._watch.losses:
                losses = self._watch.losses
            self._journal.add(
                self.step, journal.Entry({}, ends=True, losses=losses)
            )
            self._open(losses)
            return
        mixed = {g: self._readers[g].announced for g in chosen}
        self._journal.add(self.step, journal.Entry(mixed))
        if not chosen:
            self.num_skipped += 1
            self._num_short += 1
            if self._num_short == self._next_told:
                self._next_told *= 10
                _log.warning(
                    "Step %d: no mix, the %d. in a row, since too few of the "
                    "groups %s have a version that was not mixed before. "
                    "Training continues; this is logged again when %d in a row "
                    "are left out.",
                    self.step,
                    self._num_short,
                    list(groups),
                    self._next_told,
                )
            return
        self._num_short = 0
        staged = [self._readers[group].staged for group in chosen]
        others, counts = self._mean(staged)
        own = self._own_count(chosen)
        for group in chosen:
            version = self._readers[group].take().version
            self._counted[group] = self._count_of(version), self._seen
            self.num_bytes += version.num_bytes
        share = sum(counts) / (sum(counts) + own)
        self._weights().mix(others, share=share, num=len(chosen) + 1)
        self._reduced = None
        self.num_mixes += 1
        self.staleness_steps = {
            group: self.step - self._readers[group].current for group in chosen
        }

    # ---- until when ----

    def _ends(self, chosen: Sequence[int]) -> bool:
        """Whether this mix is not to take place, nor any later one.

        All workers find the same. If it does take place, the chief has its
        versions compared for the next one.
        """
        staged = [self._readers[group].staged for group in chosen]
        found = [s for s in staged if s is not None]
        before = self._journal.replay(self.step)
        if before is not None:
            ends = before.ends
        else:
            ends = self._is_to_end or any(
                s.version.manifest.extras.get(barrier.OPEN_FIELD) is True
                for s in found
            )
        if not ends and found and self._watch and self._is_chief:
            self._watch.take([s.values for s in found])
        return ends

    def _open(self, losses: Sequence[float] | None) -> None:
        if self._until is None:
            return
        self._until.open(losses)
        # The distillation weight was a constant in it.
        self.model.make_train_function(force=True)
        if not self._is_chief:
            return
        reason = "as in another group"
        if losses is not None:
            reason = (
                "since on the canary batch the mean of the versions has the "
                "loss {:.4f}, this group's own {:.4f} and its peers' {:.4f}"
            ).format(*losses)
        _log.warning(
            "Step %d: from now on weights are not mixed, %s.", self.step, reason
        )

    # ---- which versions ----

    def _agreed(self, groups: tuple[int, ...]) -> list[int]:
        """Returns the peers to mix with; every worker has read from them."""
        before = self._journal.replay(self.step)
        if before is not None:
            return self._repeated(before.versions)
        need = len(groups) if self._quorum == "all" else int(self._quorum)
        if not self._grace_secs:
            ready = sorted(set(self._round().ready).intersection(groups))
        else:
            for group in groups:
                self._readers[group].limit = self.step
            with self.waits.measured():
                ready = self._awaited(groups, need)
        recent = [group for group in ready if self._is_recent(group)]
        return recent if len(recent) >= need else []

    def _is_recent(self, group: int) -> bool:
        """Whether what all workers have read of a group is within the bounds.

        A version that does not say its examples is as old as can be.
        """
        staged = self._readers[group].staged
        if staged is None:
            return False
        version, most = staged.version, self._bounds["steps"]
        if most is not None and self.step - version.step > most:
            return False
        most = self._bounds["examples"]
        if most is None:
            return True
        had = version.manifest.extras.get(EXAMPLES)
        had = float(had) if isinstance(had, int | float) else 0.0
        return self._exporter.counts[EXAMPLES] - had <= most

    def _awaited(self, groups: tuple[int, ...], need: int) -> list[int]:
        """Waits for versions of this step, while there is hope and time."""
        deadline = self._clock() + self._grace_secs
        self._exporter.ensure_published(self._grace_secs)
        num_rounds = 0
        while True:
            news = self._round(is_over=self._clock() >= deadline)
            num_rounds += 1
            ready = {g: news.ready[g] for g in groups if g in news.ready}
            exact = [g for g, step in ready.items() if step == self.step]
            for group in news.failed:
                self._missed[group] = news.newest[group]
            alive = {
                group
                for group in groups
                if news.newest[group] > self._missed.get(group, -2)
            }
            if len(exact) >= need:
                break
            if news.is_over or len(alive.union(ready)) < need:
                break
            if alive <= set(exact):
                break
            self._announce(news, groups, replace=True)
            time.sleep(_PAUSE_SECS)
        self.num_waits += num_rounds > 1
        if len(exact) >= need:
            return sorted(exact)
        for group in alive.difference(exact):
            self._missed[group] = news.newest[group]
        return sorted(ready) if len(ready) >= need else []

    def _repeated(self, mixed: Mapping[int, int]) -> list[int]:
        """Reads what was mixed at this step before the training was stopped."""
        deadline = self._clock() + _REPLAY_SECS
        wanted = {g: s for g, s in mixed.items() if g in self._readers}
        self._rounds.announce(wanted)
        while True:
            news = self._round(is_over=self._clock() >= deadline)
            for group in news.failed:
                wanted.pop(group, None)
            ready = [g for g in wanted if g in news.ready]
            if news.is_over or len(ready) == len(wanted):
                break
            time.sleep(_PAUSE_SECS)
        if len(ready) < len(mixed):
            self._journal.warn(self.step)
        return sorted(ready)

    # ---- what they count, and their mean ----

    @property
    def _seen(self) -> float:
        """What this group has trained on, in the unit of `weigh_by`."""
        if self._weigh_by == GROUPS:
            return 0.0
        return self._exporter.counts[self._weigh_by]

    def _count_of(self, version: versions.Version) -> float:
        """Returns the updates or examples that a version says it has seen."""
        found: Any = version.manifest.extras.get(self._weigh_by)
        is_number = isinstance(found, int | float)
        return max(float(found), 0.0) if is_number else 0.0

    def _own_count(self, groups: Sequence[int]) -> float:
        """What own weights count, since a mix with any of these groups."""
        before = max(self._counted.get(g, (0.0, 0.0))[1] for g in groups)
        return self._added(self._seen, before)

    def _added(self, count: float, before: float) -> float:
        if self._weigh_by == GROUPS:
            return 1.0
        # A group that resumed may be at fewer than before.
        return max(count - before, 1.0)

    def _mean(
        self, staged: Sequence[Any]
    ) -> tuple[list[tf.Tensor], list[float]]:
        counts = [
            self._added(
                self._count_of(s.version),
                self._counted.get(s.version.group, (0.0, 0.0))[0],
            )
            for s in staged
        ]
        key = [(s.version.group, s.version.step) for s in staged], counts
        known = self._reduced
        if known is None or known[0] != key:
            mean = self._weights().mean_of([s.values for s in staged], counts)
            known = self._reduced = key, mean
        return known[1], counts

    def _in_background(self) -> None:
        self._reduce_ahead()
        if self._watch:
            self._watch.examine()

    def _reduce_ahead(self) -> None:
        """Finds the mean of what has been read, on the reading thread."""
        staged = [r.staged for r in self._readers.values() if r.staged]
        try:
            if staged:
                self._mean(staged)
        except Exception:  # A mix that needs the mean will find out.
            _log.exception("The mean of %d versions failed.", len(staged))

    # ---- for a backup ----

    @property
    def variables_for_backup(self) -> list[tf.Variable]:
        """The rule's state, which a `tfdistill.Backup` keeps."""
        return self._weights().state

    def state_for_backup(self) -> dict[str, Any]:
        """Returns what a `tfdistill.Backup` keeps of it, as JSON."""
        return {
            "initial_weights": self.initial_weights,
            "versions": {
                str(group): reader.current
                for group, reader in self._readers.items()
            },
            "barrier": {"is_open": self._is_over, "losses": self._losses},
            "counted": {str(g): n for g, n in self._counted.items()},
            "missed": {str(g): n for g, n in self._missed.items()},
            "counts": [
                self.num_mixes,
                self.num_skipped,
                self.num_waits,
                self.num_bytes,
            ],
        }

    @property
    def _losses(self) -> Sequence[float] | None:
        return self._until.losses if self._until else None

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_for_backup` returned, once training has begun."""
        self.initial_weights = state["initial_weights"]
        if state["barrier"]["is_open"]:
            self._open(state["barrier"]["losses"])
        for group, step in state["versions"].items():
            if int(group) in self._readers:
                self._readers[int(group)].current = step
        self._counted = {
            int(g): (a, b) for g, (a, b) in state["counted"].items()
        }
        self._missed = {int(g): n for g, n in state["missed"].items()}
        (
            self.num_mixes,
            self.num_skipped,
            self.num_waits,
            self.num_bytes,
        ) = state["counts"]


def _of_coordinator(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over a group of parameter servers: its coordinator decides."""
    return values, values[:0]


def _check_wait(quorum: Any, grace_secs: Any) -> None:
    is_count = isinstance(quorum, numbers.Integral) and quorum is not True
    if quorum != "all" and not (is_count and quorum >= 1):
        raise ValueError(
            "`quorum` must be how many peers a mix needs, >= 1, or 'all'; "
            f"received {quorum!r}."
        )
    is_number = isinstance(grace_secs, numbers.Real)
    if not is_number or not 0 <= grace_secs < math.inf:
        raise ValueError(
            f"`grace_secs` must be finite and >= 0; received {grace_secs!r}."
        )
