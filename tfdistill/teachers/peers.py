"""The other groups as teachers: their exports, run in the student's step."""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.follow import arrivals
from tfdistill.follow import follower as follower_lib
from tfdistill.follow import places as places_lib
from tfdistill.follow import reading
from tfdistill.follow import screen
from tfdistill.system import run_files
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import output_kinds
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher
from tfdistill.teachers import worth

_log = logging.getLogger(__name__)
# How many of the newest quarantined versions a status lists.
_MAX_LISTED = 10
# A place is free for another group once its own has published nothing that can
# be used before so many refreshes after the burn-in, or so many versions in a
# row that were refused; or if another is this many of its intervals ahead.
_PATIENCE, _MOST_REFUSED, _FAR_AHEAD = 10, 2, 5
# After so many of its intervals without a version, a peer that is worse than
# the student on the student's own batches is not waited for.
_LATE_INTERVALS = 3
_OTHER_GRAPH = (
    "Running a peer's own graph is off by default. Train the same model in "
    "each group, or set teachers.Peers(allow_other_graphs=True) if you trust "
    "all of them."
)


class Peers(teacher.Teacher):
    """The newest versions of other groups, one teacher for each group.

    While training runs, each peer's newest export is read in the background;
    once every worker of this group has read it, all swap it in at the same
    step. If a peer's graph equals the student's, the student's own graph runs
    with the peer's values, and the peer's graph file is never loaded.

    A version is quarantined, and the one before it stays in use, if it is
    damaged, unsigned, of other shapes, not finite, or on a labeled `canary`
    clearly worse than the student was at the version's step. A version that its
    group made in the burn-in, while the student's distillation weight was 0, is
    never read. Old versions lose their weight.

    With `at_most`, neither a step nor the exchange costs more with more groups.
    A peer that publishes nothing, fades, is refused twice, or is far behind
    another group is replaced by that group.

    Under parameter servers, peers must train the student's own graph.

    Example:
        >>> peers = Peers(peers=[1, 2], weight=0.5)
        >>> peers.weight
        0.5
    """

    def __init__(
        self,
        exchange: publisher.Exchange | None = None,
        *,
        peers: Sequence[int] | None = None,
        at_most: int | None = None,
        weight: float = 1.0,
        max_staleness_steps: int | str | None = staleness.AUTO,
        canary: tf.data.Dataset | tuple[Any, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        allow_other_graphs: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where peers publish. Default: the environment's exchange,
                `Exchange(cluster.exchange)`.
            peers: Groups to learn from. Default: all others of the run.
            at_most: How many of them to learn from at a time, >= 1, at first
                those with the next higher numbers. Default: all.
            weight: Weight of each peer, >= 0. For different weights pass
                several `Peers`. Default 1.
            max_staleness_steps: Versions older than this many student steps
                aren't used. None: no limit. Default "auto": a peer that has
                published nothing for ten of the intervals at which its versions
                arrived before fades, over ten more. Its next version gets full
                weight.
            canary: Held-out examples on which each version is tested first: a
                dataset as `fit` takes it, or arrays `(x, y)`, of which the
                first 256 examples are taken. A version is refused if its
                outputs are not finite or have another shape, and, if there are
                targets, if by the task loss it is clearly worse than the
                student was at the version's step. Default: the
                `validation_data` of `fit`, if these are a dataset or arrays.
            schema: What peers' labels, vocabularies and columns must be; see
                `follow.screen.digests`. Default: nothing is compared.
            allow_other_graphs: Whether to run peers' graphs that differ from
                the student's, if they hold only what `exports.graph_ops`
                lists. Loading a graph runs its code. Default False.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(name="peers", weight=weight)
        if exchange is not None:
            publisher.check_exchange(exchange)
        self.exchange = exchange
        self.peers = peers
        if peers is not None:
            self.peers = follower_lib.checked_groups(peers)
        if at_most is not None and (type(at_most) is not int or at_most < 1):
            raise ValueError(
                "`at_most` must be a number of groups >= 1, or None for all; "
                f"received {at_most!r}."
            )
        self.at_most = at_most
        self.max_staleness_steps = staleness.checked(max_staleness_steps)
        self.canary = canary
        self.schema = screen.digests(schema or {})
        self.allow_other_graphs = allow_other_graphs

    def members(self, cluster: identity.Cluster) -> Sequence[teacher.Teacher]:
        """Returns a teacher for each group, or for `at_most` of them."""
        groups = cluster.peers if self.peers is None else self.peers
        exchange = exchange_for(self.exchange, groups, cluster)
        canary = None
        if self.canary is not None and groups:
            canary = canary_lib.Canary(self.canary)
        places = places_lib.Places(exchange, groups)
        if self.at_most is not None and self.at_most < len(groups):
            # Each group prefers others, so that all are listened to.
            groups = sorted(groups, key=lambda g: (g < cluster.group, g))
        return [
            Peer(group, exchange, self, canary, places)
            for group in groups[: self.at_most]
        ]


def exchange_for(
    exchange: publisher.Exchange | None,
    groups: Sequence[int],
    cluster: identity.Cluster,
) -> publisher.Exchange:
    """Returns the exchange that was given, or else the environment's."""
    if exchange is None and groups and cluster.exchange is None:
        raise ValueError(
            f"Learning from the groups {tuple(groups)} needs an exchange, but "
            "none was passed and the environment has none. Start the run with "
            "tfdistill run, set TFDISTILL_EXCHANGE, or pass "
            "tfdistill.Exchange(directory)."
        )
    return exchange or publisher.Exchange(cluster.exchange)


class Peer(teacher.Teacher):
    """One other group: its version in use, and what that still counts.

    With `at_most`, another group may take its place: logs name that one.
    """

    def __init__(
        self,
        group: int,
        exchange: publisher.Exchange,
        options: Peers,
        canary: canary_lib.Canary | None,
        places: places_lib.Places,
    ) -> None:
        """Reads nothing yet; `group` is the first that it follows."""
        super().__init__(
            name=run_files.group_name(group), weight=options.weight
        )
        self.places, self.exchange = places, exchange
        self.canary = canary
        self._options, self._first_group = options, group
        # On a chief: what compares its versions on held-out rows.
        self._compared: worth.VersionLosses | None = None
        self._reading = threading.Lock()
        # What runs the graph that is loaded for the version to come.
        self._next: Any = None
        # The student's step at the last refresh.
        self._now: int | None = None
        self._num_dropped = self._num_waits = 0
        self.arrivals = arrivals.Arrivals()
        self._start_over()

    # ---- before training ----

    def attach(self, student: teacher.Student) -> None:
        """Makes room for a version, and what follows the group."""
        self._student, self._graph = student, (graph := student.graph)
        self._fingerprint = graph.fingerprint
        if student.on_servers and self._options.allow_other_graphs:
            raise ValueError(
                "Peers of a parameter-server group must have the student's own "
                "graph; received allow_other_graphs=True. Leave it out, or "
                "train without parameter servers."
            )
        self._writer = saved_model.SavedModelWriter(graph)
        # The copy that runs in the step, and the copy that reads versions of
        # the own graph.
        self._copy = self._own_copy = student.place(
            self.name, graph, shares=True
        )
        self.canary = self.canary or student.held_out
        if self.canary is not None:
            # Traced here: the reading thread must not run the student's code.
            self._own_copy.try_out(self._writer.snapshot(), self.canary.inputs)
            if student.is_chief:
                known = student.held_out_losses
                if self.canary not in known:
                    known[self.canary] = worth.HeldOut(self.canary, student)
                if known[self.canary].can_compare:
                    self._compared = worth.VersionLosses(known[self.canary])
        may_differ = self._options.allow_other_graphs
        check = functools.partial(
            screen.check,
            specs=graph,
            schema=self._options.schema,
            only_own="" if may_differ else _OTHER_GRAPH,
        )
        self._reader = reading.Reader(
            self.exchange, self._writer.variables, check
        )
        self.follower = follower_lib.Follower(
            self.exchange,
            self._first_group,
            read=self._read,
            screen=check,
            wanted=self._is_wanted,
            deltas_of=graph.fingerprint,
            alone=student.num_workers == 1,
        )
        self.places.followers.append(self.follower)

    def compiled_again(self) -> None:
        """Leaves the student what it has begun to train, before a `fit`."""
        if self._student.on_servers:
            return
        with self._student.strategy.scope():
            copy = self._own_copy.without_trained()
        if self._copy is self._own_copy:
            self._copy = copy
        self._own_copy = copy

    # ---- in the step ----

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Runs the version in use on the student's inputs."""
        return self._copy.infer(batch.inputs)

    # ---- reading a version, in the background ----

    def _is_wanted(self, version: versions.Version) -> bool:
        """Whether neither group was in its burn-in when it was published."""
        return not (
            version.manifest.extras.get(screen.BURN_IN_FIELD)
            or self._student.in_burn_in(version.step)
        )

    def _read(self, version: versions.Version) -> saved_model.Snapshot:
        """Reads the values of a version that passed the screen."""
        is_own = version.manifest.graph_fingerprint == self._graph.fingerprint
        # A read that was given up may be under way still.
        with self._reading:
            copy = self._own_copy
            if is_own:
                frames = self.follower.frames
                values = self._reader.read(version, copy, frames)
                values = copy.prepared(values)
            else:
                expected = saved_model.in_order(version.manifest.variables)
                values = copy.read(version, expected)
        if is_own:
            infer = functools.partial(copy.try_out, values)
            self._try_out(infer, version.step)
        return values

    def _try_out(self, predict: Callable[[Any], list[Any]], step: int) -> None:
        if self.canary is None:
            return
        outputs = self.canary.check(predict, self._graph.output_spec)
        if self._compared is None:
            return
        in_use = self.follower.current
        if why := self._compared.doubt_new(outputs[0], step, in_use=in_use):
            raise screen.Refused(why)

    # ---- between steps, on all workers at the same step ----

    @property
    def needs_graph(self) -> bool:
        """Whether the staged version needs another graph, or variables."""
        staged = self.follower.staged
        return staged is not None and not (
            staged.fingerprint == self._fingerprint
            and self._copy.fits(staged.values)
        )

    def load_graph(self) -> str | None:
        """Loads the staged version's graph; what is in use stays in use.

        Returns why the version cannot be used, or None.
        """
        staged: Any = self.follower.staged
        own, self._next = self._own_copy, None
        try:
            with self._student.strategy.scope():
                if staged.fingerprint != self._graph.fingerprint:
                    self._next = self._load(staged)
                elif own.fits(staged.values):
                    self._next = own
                else:
                    self._next = own.with_room_for(staged.values)
        except Exception as error:  # Loading raises whatever its code raises.
            return f"its graph cannot be used: {error}"
        return None

    def _load(self, staged: follower_lib.Staged) -> other_graphs.FrozenFunction:
        """Loads a peer's own graph, and tries it out."""
        function = other_graphs.load_version(
            self.exchange, staged.version, self._graph
        )
        function.check(staged.values)
        losses, own = self._student.losses, self._graph.ends
        output_kinds.check_ends(self.label, function.ends, losses, own)
        self._try_out(function, staged.version.step)
        blank = canary_lib.blank(self._graph.input_spec)
        if self.canary is None and blank is not None:
            # Its nodes may be of a device that is not there.
            function(blank)
        return function

    def swap(self, step: int | None = None) -> bool:
        """Puts the staged version in place, at a step of the student.

        Returns whether its graph is another one, so that steps must be traced
        again.
        """
        staged: Any = self.follower.staged
        # A graph loaded for a version that another worker refused is useless.
        loaded, self._next = self._next, None
        if changed := self.needs_graph:
            self._copy = loaded
            self._fingerprint = staged.fingerprint
            if self._fingerprint == self._graph.fingerprint:
                self._own_copy = self._copy
        self._copy.install(staged.values)
        # From now on the next one may be read over these values.
        self.follower.take_staged()
        extras = staged.version.manifest.extras
        self._silence.arrived(step, extras.get(screen.INTERVAL_FIELD))
        self._now, self._drop_reason = step, ""
        self.arrivals.add(staged.version)
        return changed

    def drop(self, reason: str) -> None:
        """Quarantines the version in use; its group's next one may teach."""
        if self._in_use:
            self.follower.reject(self.follower.current, reason)
            self._drop_reason = reason
            self._num_dropped += 1

    def doubt(self) -> str:
        """Returns why the version in use should not count, or ""."""
        version, now = self.follower.current, self._now or 0
        is_late = (
            self._silence.intervals(now, version=version) >= _LATE_INTERVALS
        )
        if self._compared is None:
            return self.score.doubt(self.label, self.waits, is_late=is_late)
        since = now - int(self._silence.interval or 0)
        return self._compared.doubt(version, now, since, is_late=is_late)

    def refresh(self, step: int | None) -> None:
        """Notes the student's step; logs each change of health, once."""
        if step is None:
            return
        if not self._in_use:
            self._num_waits += not self._student.in_burn_in(step)
            return
        self._now, self._num_waits = step, 0
        self._silence.refreshed(step)
        self._log_health()

    def next_group(self) -> int:
        """Returns the group that should take its place, on a chief, or -1."""
        current, interval = self.follower.current, self._silence.interval
        num_refused = sum(each > current for each in self.follower.rejected)
        is_free = self._num_waits > _PATIENCE or num_refused >= _MOST_REFUSED
        is_free |= current >= 0 and self.standing().share < 1
        if is_free or self.waits:
            return self.places.best(newer_than=-1)
        if current < 0 or interval is None:
            return -1
        # Its newest published version, even if a slow student hasn't read it.
        newest = max(current, self.follower.newest, self.follower.announced)
        return self.places.best(newer_than=newest + _FAR_AHEAD * interval)

    def follow(self, group: int) -> None:
        """Makes room for another group, which teaches once it is read."""
        before, found = self.label, self.standing()
        self.places.move(self.follower, group)
        why = self.waits or found.reason or f"{found.health}, but behind"
        why = why.rstrip(".")
        _log.warning("%s replaces %s: %s.", self.label, before, why)
        self._start_over()

    def forget(self) -> None:
        """Follows the group as if it had published nothing yet."""
        self.follower.follow(self.follower.group)
        self._now = None
        self._start_over()

    def _start_over(self) -> None:
        self._silence, self._logged = staleness.Silence(), (teacher.GOOD, False)
        self.arrivals.start_over()
        self._drop_reason, self.waits, self._num_waits = "", "", 0
        self.score = worth.Score()
        if self._compared is not None:
            self._compared.forget()

    # ---- what the version counts ----

    @property
    def _in_use(self) -> bool:
        return not self._drop_reason and self.follower.current >= 0

    def standing(self) -> teacher.Standing:
        """Returns what the version in use counts until the next refresh."""
        if self._drop_reason:
            return super().standing()
        step, rejected = self.follower.current, self.follower.rejected
        if step < 0:
            reason = rejected.get(max(rejected, default=-1), "")
            return teacher.Standing(teacher.ABSENT, reason, share=0.0)
        return staleness.standing(
            step,
            self._now,
            max_staleness_steps=self._options.max_staleness_steps,
            silence=self._silence,
        )

    @property
    def label(self) -> str:
        """The name of the group that it follows."""
        return run_files.group_name(self.follower.group)

    def _log_health(self) -> None:
        found = self.standing()
        before, self._logged = self._logged, (found.health, found.share == 0)
        if self._logged == before:
            return
        if found.health == teacher.GOOD:
            _log.info("The teacher %s has its full weight again.", self.label)
            return
        _log.warning(
            "The teacher %s, version %d, is %s: %s. It %s until a newer "
            "version arrives.",
            self.label,
            found.step,
            found.health.replace("_", " "),
            found.reason,
            "loses weight" if found.share else "has no weight",
        )

    def status(self) -> dict[str, Any]:
        """Describes the peer, for logs."""
        rejected = self.follower.rejected
        return {
            **super().status(),
            **self.arrivals.status(),
            "read_secs": self.follower.reads.last_secs,
            "num_dropped": self._num_dropped,
            "num_quarantined": len(rejected),
            "quarantined": {
                step: rejected[step] for step in sorted(rejected)[-_MAX_LISTED:]
            },
        }

    # ---- for a backup ----

    def state(self) -> dict[str, Any]:
        """Returns which version is in use, and what it counts."""
        return {
            "step": self.standing().step,
            "now": self._now,
            "silence": [*dataclasses.astuple(self._silence)],
            "group": self.follower.group,
        }

    def recall(self, state: Mapping[str, Any]) -> int:
        """Follows the group of a state again; returns its version, or -1."""
        group = state.get("group", self.follower.group)
        if group in self.places.groups and group != self.follower.group:
            self.places.move(self.follower, group)
        return state.get("step", -1) if group == self.follower.group else -1

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, once its version was read again."""
        if self.follower.current == state["step"] >= 0:
            self._now = state["now"]
            self._silence = staleness.Silence(*state["silence"])
