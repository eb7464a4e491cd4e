"""The other groups as teachers: their exports, run in the student's step."""

import functools
import logging
import threading
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import follower as follower_lib
from tfdistill.follow import screen
from tfdistill.system import background
from tfdistill.system import run_files
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import copies
from tfdistill.teachers import merit as merit_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher

_log = logging.getLogger(__name__)
# Of the quarantined versions, how many of the newest a status holds.
_MAX_LISTED = 10
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

    A version that is damaged, unsigned, of other shapes or not finite is
    quarantined. One that has grown old loses its weight, and so does one that
    is clearly worse than the student on a labelled `canary`.

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
        weight: float = 1.0,
        max_staleness_steps: int | str | None = staleness.AUTO,
        canary: tf.data.Dataset | tuple[Any, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
        allow_other_graphs: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where peers publish. Default: that of the environment,
                `Exchange(cluster.exchange)`.
            peers: Groups to learn from. Default: all others of the run.
            weight: What each of them counts, >= 0. For different weights pass
                several `Peers`. Default 1.
            max_staleness_steps: A version that is more of the student's steps
                old than this loses its weight; None for no bound. Default
                "auto": a peer that has published nothing for ten of the
                intervals at which its versions arrived before fades, over ten
                more. Its next version gets full weight.
            canary: Held-out examples that each version must predict before it
                is used: a dataset as `fit` takes it, or arrays `(x, y)`, of
                which the first 256 examples are taken. A version is refused if
                its outputs are not finite or have another shape. If the
                targets are class indices, 0 and 1, or one-hot rows, one that
                is clearly worse than the student has no weight. Default: the
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
        self.peers = None if peers is None else checked_groups(peers)
        self.bound = max_staleness_steps
        self.max_staleness_steps = staleness.checked(max_staleness_steps)
        self.canary = canary
        self.schema = screen.digests(schema or {})
        self.allow_other_graphs = allow_other_graphs

    def members(self, cluster: identity.Cluster) -> Sequence[teacher.Teacher]:
        """Returns a teacher for each group."""
        groups = cluster.peers if self.peers is None else self.peers
        exchange = exchange_for(self.exchange, groups, cluster)
        canary = None
        if self.canary is not None and groups:
            canary = canary_lib.Canary(self.canary)
        return [Peer(group, exchange, self, canary) for group in groups]


def checked_groups(peers: Sequence[int]) -> list[int]:
    """Returns indices of groups; ValueError if they are none, or come twice."""
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )
    return list(peers)


def exchange_for(
    exchange: publisher.Exchange | None,
    groups: Sequence[int],
    cluster: identity.Cluster,
) -> publisher.Exchange:
    """Returns the exchange that was given, or else the environment's."""
    if exchange is None and groups and cluster.exchange is None:
        raise ValueError(
            f"Learning from the groups {tuple(groups)} needs an exchange; "
            "received none, and the environment names none. Launch the run by "
            "launch.local, set TFDISTILL_EXCHANGE, or pass "
            "tfdistill.Exchange(directory)."
        )
    return exchange or publisher.Exchange(cluster.exchange)


class _OtherGraph:
    """A peer's own graph and its variables."""

    def __init__(
        self, function: other_graphs.FrozenFunction, values: Sequence[Any]
    ) -> None:
        self.infer = function
        ours = [tuple(variable.shape) for variable in function.variables]
        theirs = [tuple(value.shape) for value in values]
        if ours != theirs:
            raise ValueError(
                f"its graph must have variables of the shapes {theirs}, as "
                f"its manifest says; found {ours}."
            )

    def install(self, values: saved_model.Snapshot) -> None:
        copies.assign(self.infer.variables, values)


class Peer(teacher.Teacher):
    """One other group: its version in use, and what that still counts."""

    def __init__(
        self,
        group: int,
        exchange: publisher.Exchange,
        options: Peers,
        canary: canary_lib.Canary | None,
    ) -> None:
        """Reads nothing yet."""
        super().__init__(
            name=run_files.group_name(group), weight=options.weight
        )
        self.group, self.exchange = group, exchange
        self.max_staleness_steps = options.max_staleness_steps
        self._options = options
        self._canary = canary
        self._silence = staleness.Silence()
        self._merit: merit_lib.Merit | None = None
        # What the chief has found of the version in use, and of the next one.
        self._is_worse = self._next_is_worse = False
        self._is_burn_in = False
        self._reading = threading.Lock()
        # A graph that is loaded for the version to come.
        self._next: copies.Copy | _OtherGraph | None = None
        # The last version of another graph that has answered the canary.
        self._examined = -1
        # The student's step at the last refresh.
        self._now: int | None = None
        self._logged = teacher.GOOD, False
        # For logs.
        self._reads = background.WorkTimes()
        self._last_num_bytes: int | None = None
        self._num_swaps = self._num_bytes = self._num_dropped = 0

    # ---- before training ----

    def attach(self, student: teacher.Student) -> None:
        """Makes room for a version, and what follows the group."""
        self._student, graph = student, student.graph
        self._graph = graph
        self._fingerprint = graph.fingerprint
        if student.on_servers:
            if self._options.allow_other_graphs:
                raise ValueError(
                    "Peers of a parameter-server group must have the student's "
                    "own graph; received allow_other_graphs=True. Leave it "
                    "out, or train without parameter servers."
                )
            self.remote = on_servers.ServerCopy(self.name, graph)
        self._writer = saved_model.SavedModelWriter(graph)
        # What runs in the step, and what reads versions of the own graph.
        self._place = self._own_place = self.remote or copies.Copy(graph)
        self._canary = self._canary or student.held_out
        if self._canary is not None:
            self._prepare_canary(self._canary, student)
        self.follower = follower_lib.Follower(
            self.exchange,
            self.group,
            read=self._read,
            screen=self._screen(graph),
            alone=student.num_workers == 1,
        )

    def _screen(self, graph: student_graph.StudentGraph) -> screen.Screen:
        schema = self._options.schema
        if self._options.allow_other_graphs:
            return screen.Screen(graph, schema=schema)
        same_graph = screen.refuse_other_graphs(graph, _OTHER_GRAPH)
        return screen.Screen(graph, schema=schema, also=same_graph)

    def _prepare_canary(
        self, canary: canary_lib.Canary, student: teacher.Student
    ) -> None:
        # Traced here: the reading thread must not run the student's code.
        self._own_place.try_out(self._writer.snapshot(), canary.inputs)
        if canary.labels is None or not student.is_chief:
            return
        if canary not in student.merits:
            run = self._own_place.try_out
            if student.on_servers:
                run = on_servers.student_runner(student.graph)
            student.merits[canary] = merit_lib.Merit(canary, student, run)
        self._merit = student.merits[canary]

    # ---- in the step ----

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Runs the version in use on the student's inputs."""
        return self._place.infer(batch.inputs)

    # ---- reading a version, in the background ----

    def _read(self, version: versions.Version) -> saved_model.Snapshot:
        """Reads the values of a version that passed the screen."""
        is_own = version.manifest.graph_fingerprint == self._graph.fingerprint
        expected = (
            self._writer.variables
            if is_own
            else saved_model.in_order(version.manifest.variables)
        )
        # A read that was given up may be under way still.
        with self._reading, self._reads.measured():
            values = self._own_place.read(version, expected)
        if is_own:
            self._try_out(
                version.step,
                functools.partial(self._own_place.try_out, values),
            )
        return values

    def _try_out(self, version: int, predict: Any) -> None:
        """Has a version predict the canary batch, if there is one."""
        if self._canary is None:
            return
        loss = self._canary.check(predict, self._student)
        if self._merit is not None:
            self._merit.compare(self.name, version, loss)

    def examine(self) -> None:
        """Has a version of another graph answer the canary, once it is in use.

        On the reading thread of the chief: a peer's own graph does not run
        with values before they are in place.
        """
        version, place = self.step, self._place
        is_other = isinstance(place, _OtherGraph)
        if not is_other or version == self._examined or self._merit is None:
            return
        try:
            self._try_out(version, place.infer)
        except Exception as error:  # A peer's graph raises what it likes.
            _log.info("%s failed on the canary batch: %s", self.name, error)
        self._examined = version

    # ---- between steps, on all workers at the same step ----

    @property
    def step(self) -> int:
        """The version in use, or -1."""
        return self.follower.current

    @property
    def in_use(self) -> bool:
        """Whether there is a version to obey."""
        return not self._drop_reason and self.step >= 0

    def verdicts(self) -> tuple[bool, bool]:
        """What the chief has found: is this version worse, is the next one?"""
        if self._merit is None:
            return False, False
        self._merit.take()
        worse = self._merit.worse.get(self.name, {})
        return (
            worse.get(self.step, self._is_worse),
            worse.get(self.follower.announced, False),
        )

    def take_verdicts(self, is_worse: Any, next_is_worse: Any) -> None:
        """Takes what `verdicts` returned on the chief."""
        self._is_worse = bool(is_worse)
        self._next_is_worse = bool(next_is_worse)

    @property
    def needs_graph(self) -> bool:
        """Whether the staged version needs a graph that is not loaded."""
        staged = self.follower.staged
        return staged is not None and staged.fingerprint != self._fingerprint

    def load_graph(self) -> str | None:
        """Loads the staged version's graph; what is in use stays in use.

        Returns why the version cannot be used, or None.
        """
        staged = self.follower.staged
        if staged is None:
            return "nothing is staged."
        try:
            with self._student.strategy.scope():
                if staged.fingerprint == self._graph.fingerprint:
                    self._next = self._own_place
                else:
                    function = other_graphs.load_version(
                        self.exchange, staged.version, self._graph
                    )
                    self._next = _OtherGraph(function, staged.values)
                    self._try_out(staged.version.step, function)
        except Exception as error:  # Loading raises whatever its code raises.
            self._next = None
            return f"its graph cannot be used: {error}"
        return None

    def swap(self, step: int | None = None) -> bool:
        """Puts the staged version in place, at a step of the student.

        Returns whether its graph is another one, so that steps must be traced
        again.
        """
        staged = self.follower.take()
        changed = self._next is not None
        if self._next is not None:
            self._place, self._next = self._next, None
            self._fingerprint = staged.fingerprint
        self._place.install(staged.values)
        extras = staged.version.manifest.extras
        self._silence.arrived(step, extras.get(screen.INTERVAL_FIELD))
        self._is_worse, self._next_is_worse = self._next_is_worse, False
        self._now, self._drop_reason = step, ""
        self._settle()
        self._num_swaps += 1
        self._last_num_bytes = staged.version.num_bytes
        self._num_bytes += staged.version.num_bytes
        return changed

    def drop(self, reason: str) -> None:
        """Quarantines the version in use; its group's next one may teach."""
        if self.in_use:
            self.follower.reject(self.step, reason)
            self._drop_reason = reason
            self._num_dropped += 1

    def refresh(self, step: int | None) -> None:
        """Notes the student's step; logs each change of health, once."""
        if step is None or not self.in_use:
            return
        self._now = step
        if self._is_burn_in:
            # A weight that is no function of the step alone may end it.
            self._settle()
        self._silence.refreshed(step)
        self._log_health(step)

    def _settle(self) -> None:
        self._is_burn_in = self._student.in_burn_in(self.step)

    # ---- what the version counts ----

    @property
    def _age_steps(self) -> int:
        return 0 if self._now is None else self._now - self.step

    @property
    def share(self) -> float:
        """What the version counts until the next refresh, in [0, 1]."""
        return self._standing()[1]

    @property
    def health(self) -> tuple[str, str]:
        """A word for what its share is owed to, and the reason."""
        health, _, reason = self._standing()
        return health, reason

    def _standing(self) -> tuple[str, float, str]:
        """Returns its health, its share, and the reason."""
        if self._drop_reason:
            return teacher.DROPPED, 0.0, self._drop_reason
        if not self.in_use:
            rejected = self.follower.rejected
            reason = rejected.get(max(rejected, default=-1), "")
            return teacher.ABSENT, 0.0, reason
        if self._is_burn_in:
            return teacher.BURN_IN, 0.0, teacher.burn_in_reason(self.step)
        if self._is_worse:
            reason = "on the canary batch, it is clearly worse than the student"
            return teacher.WORSE, 0.0, reason
        age, most = self._age_steps, self.max_staleness_steps
        if most is not None and age > most:
            reason = f"it is {age} steps old, beyond max_staleness_steps={most}"
            return teacher.TOO_STALE, 0.0, reason
        share = 1.0
        if self._options.bound == staleness.AUTO and self._now is not None:
            share = self._silence.share(self._now)
        if share == 1:
            return teacher.GOOD, share, ""
        every = self._silence.interval
        before = f", and they came every {every:.0f} steps" if every else ""
        return (
            teacher.FADING,
            share,
            (
                "its group publishes no more versions: this one is "
                f"{age} steps old{before}"
            ),
        )

    def _log_health(self, step: int) -> None:
        """Logs a change, unless the student is better while none counts yet."""
        health, share, reason = self._standing()
        weight = self._student.weight
        if health == teacher.WORSE and weight is not None:
            if not float(weight(tf.constant(step, tf.int64))):
                return
        before, self._logged = self._logged, (health, share == 0)
        if self._logged == before:
            return
        if health == teacher.GOOD:
            again = "" if before[0] == teacher.BURN_IN else " again"
            _log.info("The teacher %s has its full weight%s.", self.name, again)
            return
        _log.log(
            logging.INFO if health == teacher.BURN_IN else logging.WARNING,
            "The teacher %s, version %d, is %s: %s. It %s until a newer "
            "version arrives.",
            self.name,
            self.step,
            health.replace("_", " "),
            reason,
            "has no weight" if share == 0 else "counts less and less",
        )

    def status(self) -> dict[str, Any]:
        """Describes the peer, for logs."""
        rejected = self.follower.rejected
        return {
            **super().status(),
            "age_steps": self._age_steps if self.in_use else None,
            "swaps": self._num_swaps,
            "bytes": self._num_bytes,
            "last_bytes": self._last_num_bytes,
            "read_secs": self._reads.last_secs,
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
            "step": self.step if self.in_use else -1,
            "now": self._now,
            "is_worse": self._is_worse,
            "silence": self._silence.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, once its version was read again."""
        if self.step == state["step"] >= 0:
            self._now, self._is_worse = state["now"], state["is_worse"]
            self._silence.restore(state["silence"])
