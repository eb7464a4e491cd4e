"""One teacher: how it is run, read, checked and replaced."""

import logging
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdistill import exchange as exchange_lib
from tfdistill import frozen_function
from tfdistill import peer_reader
from tfdistill import savedmodel
from tfdistill import specs
from tfdistill import student_graph
from tfdistill import versions

_log = logging.getLogger(__name__)


class TeacherSlot:
    """The place of one teacher in the training step.

    Attributes:
        name: `group_<g>`, or the path of a fixed SavedModel.
        reader: Follows the peer; None for a fixed teacher.
        function: From the student's inputs to the flat list of outputs.
    """

    def __init__(self, name: str, graph: student_graph.StudentGraph) -> None:
        """Makes an empty place.

        Args:
            name: Name for logs.
            graph: The student's traced inference.
        """
        self.name = name
        self.reader: peer_reader.PeerReader | None = None
        self.function: Callable[[Any], list[tf.Tensor]] | None = None
        self._graph = graph
        self._variables: list[Any] = []
        self._fingerprint = ""
        self._allow_other_graphs = False
        self._dropped = False

    def follow(
        self,
        exchange: exchange_lib.Exchange,
        group: int,
        *,
        alone: bool,
        allow_other_graphs: bool,
    ) -> None:
        """Takes a peer as the teacher. Call it in the strategy's scope.

        Args:
            exchange: Where the peer publishes.
            group: Index of the peer.
            alone: Whether this task decides for itself.
            allow_other_graphs: Whether to load graphs other than our own.
        """
        self._allow_other_graphs = allow_other_graphs
        self._run_own_graph()
        self.reader = peer_reader.PeerReader(
            exchange, group, read=self._read, alone=alone
        )

    def _run_own_graph(self) -> None:
        variables = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in self._graph.variables
        ]
        graph = self._graph
        self._variables, self._fingerprint = variables, graph.fingerprint
        self.function = lambda inputs: keras.tree.flatten(
            graph(variables, inputs)
        )

    def load(self, path: str) -> None:
        """Takes a SavedModel as the teacher. Call it in the strategy's scope.

        Args:
            path: A SavedModel that is trusted: loading it runs its code.
        """
        function = frozen_function.FrozenFunction(
            path,
            input_spec=self._graph.input_spec,
            output_spec=self._graph.output_spec,
        )
        self.function, self._variables = function, function.variables

    @property
    def step(self) -> int:
        """The version in use, or -1."""
        return self.reader.current if self.reader else -1

    @property
    def in_use(self) -> bool:
        """Whether there is a version to obey."""
        return not self._dropped and (self.reader is None or self.step >= 0)

    def swap(self, strategy: tf.distribute.Strategy) -> bool:
        """Puts the staged version in place; every worker at the same step.

        Args:
            strategy: The strategy of the student.

        Returns:
            Whether another graph was loaded, so that steps must be traced
            anew.

        Raises:
            RuntimeError: Nothing is staged.
        """
        if self.reader is None:
            raise RuntimeError(f"{self.name} is fixed: it follows no peer.")
        staged = self.reader.take()
        fingerprint = staged.version.manifest.graph_fingerprint
        changed = fingerprint != self._fingerprint
        if changed:
            with strategy.scope():
                if fingerprint == self._graph.fingerprint:
                    self._run_own_graph()
                else:
                    self.load(staged.version.path)
            self._fingerprint = fingerprint
        for variable, value in zip(self._variables, staged.values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self._dropped = False
        return changed

    def drop(self, reason: str) -> None:
        """Stops obeying the version in use.

        Args:
            reason: Why, for the log.
        """
        if self.in_use and self.reader:
            self.reader.reject(self.step, reason)
        elif self.in_use:
            _log.warning("Dropped the teacher %s: %s", self.name, reason)
        self._dropped = True

    def _read(self, version: versions.Version) -> savedmodel.Snapshot:
        """Checks a version against the student and reads its values."""
        found = version.manifest
        for what, ours, theirs in (
            ("inputs", self._graph.input_spec, found.inputs),
            ("outputs", self._graph.output_spec, found.outputs),
        ):
            _check_spec(what, specs.to_json(ours, what), theirs)
        try:
            return savedmodel.read_variables(
                version.path, self._expected_variables(version)
            )
        except ValueError as error:
            raise peer_reader.RejectedError(str(error)) from error

    def _expected_variables(
        self, version: versions.Version
    ) -> Mapping[str, Mapping[str, Any]]:
        found = version.manifest
        if found.graph_fingerprint == self._graph.fingerprint:
            return savedmodel.SavedModelWriter(self._graph).variables
        if self._allow_other_graphs:
            return savedmodel.in_order(found.variables)
        raise ValueError(
            "its graph differs from the student's, and running a peer's graph "
            "is off by default. Train the same model in each group, or set "
            "TeacherSet(allow_other_graphs=True) where you trust all of them."
        )


def _check_spec(what: str, ours: dict[str, Any], theirs: Any) -> None:
    def shapes(spec: Any) -> Any:
        return {name: leaf["shape"] for name, leaf in spec.items()}

    try:
        same = shapes(ours) == shapes(theirs)
    except (AttributeError, KeyError, TypeError):
        same = False
    if not same:
        raise peer_reader.RejectedError(
            f"its {what} must be those of the student, {ours}; received "
            f"{theirs}."
        )
