"""One teacher: how it is run, read, checked and replaced."""

import logging
import threading
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import canary as canary_lib
from tfdistill import exchange as exchange_lib
from tfdistill import other_graph
from tfdistill import peer_reader
from tfdistill import savedmodel
from tfdistill import staleness
from tfdistill import student_graph
from tfdistill import teacher_health
from tfdistill import version_screen
from tfdistill import versions

_log = logging.getLogger(__name__)
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
        self.reader: peer_reader.PeerReader | None = None
        self.function: _Function | None = None
        self.health = teacher_health.TeacherHealth(name)
        self._graph = graph
        self._variables: list[Any] = []
        self._fingerprint = ""
        self._allow_other_graphs = False
        self._exchange: exchange_lib.Exchange | None = None
        self._canary: canary_lib.Canary | None = None
        self._reading = threading.Lock()
        # A graph and its variables, loaded for the version to come.
        self._next: tuple[_Function, list[Any]] | None = None

    def follow(
        self,
        exchange: exchange_lib.Exchange,
        group: int,
        *,
        alone: bool,
        allow_other_graphs: bool,
        screen: version_screen.VersionScreen | None = None,
        canary: canary_lib.Canary | None = None,
        bounds: staleness.Bounds | None = None,
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
        self.health.bounds = bounds or staleness.Bounds()
        self._exchange = exchange
        self._allow_other_graphs = allow_other_graphs
        self.function, self._variables = self._own_graph()
        self._canary = canary
        if canary is not None:
            # Traced here: the reading thread must not run the student's code.
            self._predict(self._variables, canary.inputs)
        self._fingerprint = self._graph.fingerprint
        self.reader = peer_reader.PeerReader(
            exchange,
            group,
            read=self._read,
            screen=screen or version_screen.VersionScreen(self._graph),
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
        canary: canary_lib.Canary | None = None,
    ) -> None:
        """Takes any SavedModel as teacher. Call it in the strategy's scope.

        Args:
            path: The SavedModel.
            trust: Whether to load it whatever is in it.
            canary: What it must predict. Default: nothing.

        Raises:
            ValueError: It cannot be used.
        """
        function = other_graph.load(path, self._graph, trust=trust)
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
                    function = other_graph.load_version(
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

    def _install(self, values: savedmodel.Snapshot) -> None:
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

    def _read(self, version: versions.Version) -> savedmodel.Snapshot:
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
            raise peer_reader.RejectedError(str(error)) from error

    def _read_values(
        self,
        version: versions.Version,
        expected: Mapping[str, Mapping[str, Any]],
    ) -> savedmodel.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return savedmodel.read_variables(version.path, expected)

    def _is_own(self, version: versions.Version) -> bool:
        ours = self._graph.fingerprint
        return version.manifest.graph_fingerprint == ours

    def _expected_variables(
        self, version: versions.Version
    ) -> Mapping[str, Mapping[str, Any]]:
        found = version.manifest
        if self._is_own(version):
            return savedmodel.SavedModelWriter(self._graph).variables
        if self._allow_other_graphs:
            return savedmodel.in_order(found.variables)
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
