"""WeightMixer: a group mixes its weights with those that its peers publish."""

import logging
import time
from collections.abc import Callable
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
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.mixing import barrier
from tfdistill.mixing import journal
from tfdistill.mixing import readers
from tfdistill.mixing import rounds
from tfdistill.mixing import rules
from tfdistill.mixing import shares
from tfdistill.mixing import topologies
from tfdistill.mixing import weights
from tfdistill.system import background
from tfdistill.system import fresh_copies
from tfdistill.training import steps

_log = logging.getLogger(__name__)


class WeightMixer(fresh_copies.FreshCopies, steps.Mixer):
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
        num_mixes, num_skipped: Mixes that took place, and that lacked their
            quorum.
        num_bytes: Bytes of the versions that were mixed.
        staleness_steps: Of the last mix: by how many steps the versions were
            behind this group's own, by group.
    """

    def __init__(
        self,
        exchange: publisher.Exchange,
        rule: rules.Rule,
        *,
        every_steps: int,
        peers: str | Sequence[int] | None = None,
        quorum: int | str = 1,
        grace_secs: float = 0.0,
        weigh_by: str = shares.GROUPS,
        max_staleness_steps: int | None = None,
        seed: int = 0,
        until: schedules.MergeBarrier | None = None,
        schema: Mapping[str, Any] | None = None,
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
                all the same; `"examples"`, as many as its group has trained on
                since this group and that one last mixed.
            max_staleness_steps: Versions that are more of this group's steps
                old are not mixed. Default: no bound.
            seed: Draws the pairs of `"gossip"`, the same in all groups.
            until: What ends the mixing; the distillation weight that `compile`
                was given is the same object. Default: it goes on to the end.
            schema: What peers' labels, vocabularies and columns must be; see
                `screen_lib.digests`. Default: nothing is compared.
            clock: Seconds of a clock that never goes backwards.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        publisher.check_exchange(exchange)
        rules.check_rule(rule)
        if until is not None and not isinstance(until, schedules.MergeBarrier):
            raise ValueError(
                "`until` must be a tfdistill.schedules.MergeBarrier or None; "
                f"received {until!r}."
            )
        topologies.check_peers(topologies.ALL if peers is None else peers)
        self._selection = rounds.Selection(
            quorum=quorum,
            grace_secs=grace_secs,
            max_staleness_steps=max_staleness_steps,
            clock=clock,
        )
        self._shares = shares.Shares(weigh_by)
        self._origin = readers.Origin()
        self._exchange, self._rule = exchange, rule
        self._schedule = steps.EverySteps(every_steps)
        # When the next mix's versions are announced, if it will not wait.
        every = self._schedule.every_steps
        self._ahead = steps.EverySteps(every, offset_steps=every - every // 2)
        self._given_peers, self._seed = peers, seed
        self._until = until
        self._watch: barrier.BarrierWatch | None = None
        self._schema = screen_lib.digests(schema or {})
        self._exporter: Any = None
        self._made: weights.MixedWeights | None = None
        self._readers: dict[int, follower.Follower] = {}
        self._poller: follower.Following | None = None
        self._journal = journal.Journal(None)
        # The mean of what has been read, by what it consists of.
        self._reduced: tuple[Any, list[tf.Tensor]] | None = None
        # Mixes left out in a row, and how many there are when the log says so.
        self._num_short, self._next_told = 0, 1
        self.num_mixes = self.num_skipped = self.num_bytes = 0
        self.staleness_steps: dict[int, int] = {}
        # On the training thread, waits included.
        self.blocked = background.WorkTimes()

    @property
    def num_waits(self) -> int:
        """Mixes that had to wait."""
        return self._selection.num_waits

    @property
    def waits(self) -> background.WorkTimes:
        """How long the training thread waited for versions."""
        return self._selection.waits

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

    def manifest_extras(self) -> dict[str, Any]:
        """Returns what versions say to those who mix them."""
        found: dict[str, Any] = {}
        if self._origin.weights is not None:
            found[readers.INITIAL_FIELD] = self._origin.weights
        if self._is_over:
            found[barrier.OPEN_FIELD] = True
        return found

    @property
    def _is_over(self) -> bool:
        """Whether the groups mix no more."""
        return self._until is not None and self._until.is_open

    # ---- before the first step ----

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the exporter.

        Raises:
            ValueError: There is none, or it comes later or does not publish
                at the steps of the mixes.
        """
        before = list(callbacks[: list(callbacks).index(self)])
        found: list[Any] = [c for c in before if isinstance(c, steps.Exporter)]
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
        if self._origin.weights is None:
            self._origin.weights = mixed.digest()
        if self._until is not None:
            self._watch = barrier.BarrierWatch.of(self._until, model)
        self._topology = topologies.Topology(
            self._given_peers,
            group=self._exporter.group,
            num_groups=cluster.num_groups,
            seed=self._seed,
        )
        self._topology.check_quorum(self._selection.quorum)
        before = {g: reader.current for g, reader in self._readers.items()}
        self._readers = readers.of_peers(
            self._exchange,
            self._topology.everyone,
            model.graph,
            mixed,
            self._origin,
            schema=self._schema,
            on_servers=replicas.on_servers(strategy),
        )
        for group, reader in self._readers.items():
            reader.current = before.get(group, -1)
        self._rounds = rounds.Rounds(
            self._readers,
            self._origin,
            _of_coordinator
            if replicas.on_servers(strategy)
            else agreement.collective_sum(
                strategy,
                size=rounds.num_fields(len(self._readers)),
            ),
            num_workers=replicas.num_workers(strategy),
            is_chief=self._is_chief,
            wants_end=lambda: bool(self._watch and self._watch.losses),
        )
        self._journal = journal.Journal.beside(
            model.trainer.backup,
            worker=0 if self._is_chief else cluster.task_index,
        )
        self._selection.start(
            self._readers, self._rounds, self._journal, self._exporter
        )
        self._poller = follower.Following(
            list(self._readers.values()),
            proposes=self._is_chief,
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
        self._origin.forget()
        self._selection.forget()
        self._shares.forget()
        if self._is_over and self._until is not None:
            self._until.close()
            self.model.make_train_function(force=True)
        self._readers = {}
        self._num_short, self._next_told = 0, 1
        self.num_mixes = self.num_skipped = self.num_bytes = 0

    # ---- between steps ----

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Mixes when it is due."""
        super().on_train_batch_end(batch, logs)
        is_due = self._schedule.due(self.step)
        is_ahead = self._ahead.due(self.step) and self._selection.looks_ahead
        if self._is_over or not (is_due or is_ahead):
            return
        with self.blocked.measured():
            if is_due:
                self._mix(self._peers_now())
            if is_ahead:
                self._selection.look_ahead(
                    self.step, self._peers_now(), self._peers_now(after=1)
                )

    def on_train_end(self, logs: Any = None) -> None:
        """Stops the reading thread."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        self._reduced = None

    def _peers_now(self, *, after: int = 0) -> tuple[int, ...]:
        number = self.step // self._schedule.every_steps + after
        return self._topology.peers(number)

    def _mix(self, groups: tuple[int, ...]) -> None:
        if not groups:
            return  # Nobody is left over for it this time.
        chosen = self._selection.chosen(self.step, groups)
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
        announced = {g: self._readers[g].announced for g in chosen}
        self._journal.add(self.step, journal.Entry(announced))
        if not chosen:
            self.num_skipped += 1
            self._num_short += 1
            if self._num_short == self._next_told:
                self._next_told *= 10
                _log.warning(
                    "Step %d: no mix, since too few of the groups %s have a "
                    "version that was not mixed before. Training continues. "
                    "Mixes left out in a row: %d; this is logged again at %d.",
                    self.step,
                    list(groups),
                    self._num_short,
                    self._next_told,
                )
            return
        self._num_short = 0
        others, counts = self._mean([self._readers[g].staged for g in chosen])
        mixed = [self._readers[g].take().version for g in chosen]
        own = self._shares.note(mixed, self._exporter)
        self.num_bytes += sum(version.num_bytes for version in mixed)
        share = sum(counts) / (sum(counts) + own)
        self._weights().mix(others, share=share, num=len(chosen) + 1)
        self._reduced = None
        self.num_mixes += 1
        self.staleness_steps = {v.group: self.step - v.step for v in mixed}

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
            ends = self._rounds.mixing_ends or any(
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

    # ---- their mean ----

    def _mean(
        self, staged: Sequence[Any]
    ) -> tuple[list[tf.Tensor], list[float]]:
        counts = self._shares.of([s.version for s in staged])
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
    def variables(self) -> list[tf.Variable]:
        """The rule's state, which a `tfdistill.Backup` keeps."""
        return self._weights().state

    def state(self) -> dict[str, Any]:
        """Returns what a `tfdistill.Backup` keeps of it, as JSON."""
        return {
            "initial_weights": self._origin.weights,
            "versions": {
                str(group): reader.current
                for group, reader in self._readers.items()
            },
            "barrier": {"is_open": self._is_over, "losses": self._losses},
            "counted": self._shares.state(),
            "missed": {str(g): n for g, n in self._selection.missed.items()},
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

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, once training has begun."""
        self._origin.weights = state["initial_weights"]
        if state["barrier"]["is_open"]:
            self._open(state["barrier"]["losses"])
        for group, step in state["versions"].items():
            if int(group) in self._readers:
                self._readers[int(group)].current = step
        self._shares.restore(state["counted"])
        self._selection.missed = {int(g): n for g, n in state["missed"].items()}
        (
            self.num_mixes,
            self.num_skipped,
            self._selection.num_waits,
            self.num_bytes,
        ) = state["counts"]


def _of_coordinator(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over a group of parameter servers: its coordinator decides."""
    return values, values[:0]
