"""A model's inference on values that are not the model's: a teacher at work."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph


class Copy:
    """A copy of the variables of a graph, on each replica.

    Attributes:
        variables: The copies, in the order of the graph's variables.
    """

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        values: Sequence[Any] | None = None,
    ) -> None:
        """Makes them, by default all 0. Call it in the strategy's scope."""
        self._graph = graph
        self.variables = [
            tf.Variable(value, trainable=False)
            for value in values
            or (tf.zeros(v.shape, v.dtype) for v in graph.variables)
        ]

    def infer(self, inputs: Any) -> list[tf.Tensor]:
        """Runs the values in place, in the step."""
        return keras.tree.flatten(self._graph(self.variables, inputs))

    def try_out(self, values: Sequence[Any], inputs: Any) -> list[tf.Tensor]:
        """Runs other values, outside of the step."""
        tensors = [tf.convert_to_tensor(value) for value in values]
        return keras.tree.flatten(self._graph(tensors, inputs))

    def read(
        self, version: versions.Version, expected: Mapping[str, Any]
    ) -> saved_model.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return saved_model.read_variables(version.path, expected)

    def install(self, values: Iterable[Any]) -> None:
        """Puts values in place, between two steps."""
        assign(self.variables, values)


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Gives each variable its value, in the variable's own precision."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
