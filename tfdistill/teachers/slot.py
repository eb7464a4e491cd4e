"""One teacher: how it is run, read, checked and replaced."""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import background
from tfdistill.teachers import gates
from tfdistill.teachers import options
from tfdistill.teachers import peer

_log = logging.getLogger(__name__)
# Of the quarantined versions, how many of the newest a status tells.
_MAX_TOLD = 10

ABSENT, GOOD, FADING, TOO_STALE, DROPPED = (
    "absent",
    "good",
    "fading",
    "too_stale",
    "dropped",
)


class TeacherHealth:
    """The record of one teacher, for decisions and for logs.

    Attributes:
        bounds: How old its version may be.
        share_by_secs: What its version counts by its age in seconds, in
            [0, 1], as the group has agreed.
        reads: Of versions, in the background.
        last_num_bytes: Of the version put in place last; None before.
        num_swaps: Versions put in place so far.
        num_bytes: Of their files, as their manifests have it.
        num_dropped: Versions in use that were dropped.
        drop_reason: Why the version in place is not obeyed; empty where it
            is.
    """

    def __init__(
        self, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts a record.

        Args:
            name: Of the teacher, for logs.
            clock: Seconds of a clock that never goes backwards.
        """
        self.name = name
        self.clock = clock
        self.bounds = options.Bounds()
        self.share_by_secs = 1.0
        self.reads = background.WorkTimes()
        self.last_num_bytes: int | None = None
        self.num_swaps = self.num_bytes = self.num_dropped = 0
        self.drop_reason = ""
        self._first_seen: dict[int, float] = {}
        self._version = -1
        self._age_steps: int | None = None
        self._state = GOOD

    def see(self, *versions: int) -> None:
        """Notes that versions are there, -1 for none: their time begins."""
        now = self.clock()
        for version in versions:
            if version >= 0:
                self._first_seen.setdefault(version, now)

    def swapped(self, version: int, num_bytes: int) -> None:
        """Notes that a version was put in place.

        Args:
            version: Its step.
            num_bytes: Of its files.
        """
        self.see(version)
        self._first_seen = {
            step: secs
            for step, secs in self._first_seen.items()
            if step >= version
        }
        self._version, self._age_steps = version, None
        self.drop_reason, self.share_by_secs = "", 1.0
        self.num_swaps += 1
        self.num_bytes += num_bytes
        self.last_num_bytes = num_bytes

    def dropped(self, reason: str) -> None:
        """Notes that the version in place is obeyed no more."""
        self.drop_reason = reason
        self.num_dropped += 1

    @property
    def age_secs(self) -> float | None:
        """Seconds since this task first saw the version in place."""
        if self._version < 0:
            return None
        return self.clock() - self._first_seen[self._version]

    def measured_share_by_secs(self) -> float:
        """What the version in place counts by this task's clock, in [0, 1]."""
        age_secs = self.age_secs
        return 1.0 if age_secs is None else self.bounds.share_by_secs(age_secs)

    def note_step(self, step: int) -> None:
        """Notes the student's step, and logs where the teacher has aged.

        Args:
            step: The student's global step.
        """
        if self._version < 0 or self.drop_reason:
            return
        self._age_steps = step - self._version
        before, self._state = self._state, _state_of(self.share)
        if self._state in (before, GOOD):
            return
        _log.warning(
            "The teacher %s, version %d, is %d steps and %.0f s old, and the "
            "bounds are %s: %s until a newer version arrives. Does that group "
            "still run?",
            self.name,
            self._version,
            self._age_steps,
            self.age_secs,
            self.bounds,
            "it is left out"
            if self._state == TOO_STALE
            else "it counts less and less",
        )

    @property
    def share(self) -> float:
        """What the version in place counted at the last look, in [0, 1]."""
        by_steps = self.bounds.share(self._age_steps or 0, 0.0)
        return min(by_steps, self.share_by_secs)

    def describe(
        self, *, in_use: bool, rejected: Mapping[int, str]
    ) -> dict[str, Any]:
        """Describes the teacher, for logs; see `TeacherSet.status`.

        Args:
            in_use: Whether there is a version to obey.
            rejected: Quarantined versions with their reasons.
        """
        share = self.share if in_use else 0.0
        state = _state_of(share) if in_use else ABSENT
        reason = ""
        if self.drop_reason:
            state, reason = DROPPED, self.drop_reason
        elif state in (FADING, TOO_STALE):
            reason = f"older than {self.bounds}"
        elif not in_use and rejected:
            reason = rejected[max(rejected)]
        age_secs = self.age_secs
        told = sorted(rejected)[-_MAX_TOLD:]
        return {
            "name": self.name,
            "step": self._version if in_use else -1,
            "health": state,
            "reason": reason,
            "share": share,
            "age_steps": self._age_steps if in_use else None,
            "age_secs": None
            if age_secs is None or not in_use
            else round(age_secs, 1),
            "too_stale": state == TOO_STALE,
            "swaps": self.num_swaps,
            "bytes": self.num_bytes,
            "last_bytes": self.last_num_bytes,
            "read_secs": self.reads.last_secs,
            "num_dropped": self.num_dropped,
            "num_quarantined": len(rejected),
            "quarantined": {step: rejected[step] for step in told},
        }


def _state_of(share: float) -> str:
    if share >= 1.0:
        return GOOD
    return FADING if share > 0.0 else TOO_STALE


_Function = Callable[[Any], list[tf.Tensor]]


class TeacherSlot:
    """The place of one teacher in the training step.

    Attributes:
        name: `group_<g>`, or the path of a fixed SavedModel.
        reader: Follows the peer; None for a fixed teacher.
        function: From the student's inputs to the flat list of outputs.
        health: Its record: age, faults and counts.
    """

    def __init__(self, name: str, graph: student_graph.StudentGraph) -> None:
        """Makes an empty place.

        Args:
            name: Name for logs.
            graph: The student's traced inference.
        """
        self.name = name
        self.reader: peer.PeerReader | None = None
        self.function: _Function | None = None
        self.health = TeacherHealth(name)
        self._graph = graph
        self._variables: list[Any] = []
        self._fingerprint = ""
        self._allow_other_graphs = False
        self._exchange: publisher.Exchange | None = None
        self._canary: gates.Canary | None = None
        self._reading = threading.Lock()
        # A graph and its variables, loaded for the version to come.
        self._next: tuple[_Function, list[Any]] | None = None

    def follow(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        alone: bool,
        allow_other_graphs: bool,
        screen: gates.VersionScreen | None = None,
        canary: gates.Canary | None = None,
        bounds: options.Bounds | None = None,
    ) -> None:
        """Takes a peer as the teacher. Call it in the strategy's scope.

        Args:
            exchange: Where the peer publishes.
            group: Index of the peer.
            alone: Whether this task decides for itself.
            allow_other_graphs: Whether to load graphs other than our own.
            screen: Checks manifests. Default: one that compares no schema.
            canary: What each version must predict. Default: nothing.
            bounds: How old a version may be. Default: of any age.
        """
        self.health.bounds = bounds or options.Bounds()
        self._exchange = exchange
        self._allow_other_graphs = allow_other_graphs
        self.function, self._variables = self._own_graph()
        self._canary = canary
        if canary is not None:
            # Traced here: the reading thread must not run the student's code.
            self._predict(self._variables, canary.inputs)
        self._fingerprint = self._graph.fingerprint
        self.reader = peer.PeerReader(
            exchange,
            group,
            read=self._read,
            screen=screen or gates.VersionScreen(self._graph),
            alone=alone,
        )

    def _own_graph(self) -> tuple[_Function, list[Any]]:
        graph = self._graph
        variables = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in graph.variables
        ]
        return (
            lambda inputs: keras.tree.flatten(graph(variables, inputs)),
            variables,
        )

    def _predict(self, values: Sequence[Any], inputs: Any) -> list[Any]:
        tensors = [tf.convert_to_tensor(value) for value in values]
        return keras.tree.flatten(self._graph(tensors, inputs))

    def load(
        self,
        path: str,
        *,
        trust: bool = False,
        canary: gates.Canary | None = None,
    ) -> None:
        """Takes any SavedModel as teacher. Call it in the strategy's scope.

        Args:
            path: The SavedModel.
            trust: Whether to load it whatever is in it.
            canary: What it must predict. Default: nothing.

        Raises:
            ValueError: It cannot be used.
        """
        function = other_graphs.load(path, self._graph, trust=trust)
        if canary is not None:
            canary.check(function, self._graph.output_spec)
        self.function, self._variables = function, function.variables

    @property
    def step(self) -> int:
        """The version in use, or -1."""
        return self.reader.current if self.reader else -1

    @property
    def in_use(self) -> bool:
        """Whether there is a version to obey."""
        return not self.health.drop_reason and (
            self.reader is None or self.step >= 0
        )

    @property
    def status(self) -> dict[str, Any]:
        """Describes the teacher, for logs; see `TeacherSet.status`."""
        rejected = self.reader.rejected if self.reader else {}
        return self.health.describe(in_use=self.in_use, rejected=rejected)

    def note_news(self) -> None:
        """Notes which versions the peer has by now."""
        if self.reader:
            self.health.see(self.reader.proposal, self.reader.announced)

    @property
    def needs_graph(self) -> bool:
        """Whether the staged version needs a graph that is not loaded."""
        staged = self.reader.staged if self.reader else None
        return staged is not None and staged.fingerprint != self._fingerprint

    def load_graph(self, strategy: tf.distribute.Strategy) -> str | None:
        """Loads the staged version's graph; what is in use stays in use.

        Args:
            strategy: The strategy of the student.

        Returns:
            None, or why the version cannot be used.
        """
        staged = self.reader.staged if self.reader else None
        if staged is None or self._exchange is None:
            return "nothing is staged."
        try:
            with strategy.scope():
                if staged.fingerprint == self._graph.fingerprint:
                    self._next = self._own_graph()
                else:
                    function = other_graphs.load_version(
                        self._exchange, staged.version, self._graph
                    )
                    self._next = (function, function.variables)
            _check_values(self._next[1], staged.values)
            if self._canary is not None:
                self._canary.check(self._next[0], self._graph.output_spec)
        except Exception as error:  # Loading raises whatever its code raises.
            self._next = None
            return f"its graph cannot be used: {error}"
        return None

    def swap(self) -> bool:
        """Puts the staged version in place; every worker at the same step.

        Returns:
            Whether its graph is another one, so that steps must be traced
            anew.

        Raises:
            RuntimeError: Nothing is staged.
        """
        if self.reader is None:
            raise RuntimeError(f"{self.name} is fixed: it follows no peer.")
        staged = self.reader.take()
        changed = self._next is not None
        if self._next is not None:
            self.function, self._variables = self._next
            self._fingerprint, self._next = staged.fingerprint, None
        self._install(staged.values)
        self.health.swapped(staged.version.step, staged.version.num_bytes)
        return changed

    def _install(self, values: saved_model.Snapshot) -> None:
        """Puts in place what `_read_values` returned."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def drop(self, reason: str) -> None:
        """Stops obeying the version in use.

        Args:
            reason: Why, for the log.
        """
        if not self.in_use:
            return
        if self.reader:
            self.reader.reject(self.step, reason)
        else:
            _log.warning("Dropped the teacher %s: %s", self.name, reason)
        self.health.dropped(reason)

    def _read(self, version: versions.Version) -> saved_model.Snapshot:
        """Reads the values of a version that passed the screen."""
        try:
            expected = self._expected_variables(version)
            # A read that was given up may be under way still.
            with self._reading, self.health.reads.measured():
                values = self._read_values(version, expected)
            if self._canary and self._is_own(version):
                self._canary.check(
                    lambda inputs: self._predict(values, inputs),
                    self._graph.output_spec,
                )
            return values
        except ValueError as error:
            raise peer.RejectedError(str(error)) from error

    def _read_values(
        self,
        version: versions.Version,
        expected: Mapping[str, Mapping[str, Any]],
    ) -> saved_model.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return saved_model.read_variables(version.path, expected)

    def _is_own(self, version: versions.Version) -> bool:
        ours = self._graph.fingerprint
        return version.manifest.graph_fingerprint == ours

    def _expected_variables(
        self, version: versions.Version
    ) -> Mapping[str, Mapping[str, Any]]:
        found = version.manifest
        if self._is_own(version):
            return saved_model.SavedModelWriter(self._graph).variables
        if self._allow_other_graphs:
            return saved_model.in_order(found.variables)
        raise ValueError(
            "its graph differs from the student's, and running a peer's graph "
            "is off by default. Train the same model in each group, or set "
            "TeacherSet(allow_other_graphs=True) where you trust all of them."
        )


def _check_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    ours = [tuple(variable.shape) for variable in variables]
    theirs = [tuple(value.shape) for value in values]
    if ours != theirs:
        raise ValueError(
            f"its graph must have variables of the shapes {theirs}, as its "
            f"manifest says; found {ours}."
        )
