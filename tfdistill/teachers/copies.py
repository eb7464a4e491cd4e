"""A model's inference on values that are not the model's: a teacher at work."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph


class Copy:
    """A copy of the variables of a graph, on each replica.

    Attributes:
        variables: What holds the values in use.
    """

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        values: Sequence[Any] | None = None,
    ) -> None:
        """Makes them, by default all 0. Call it in the strategy's scope.

        Of values that are quantized, it holds what these hold.
        """
        empty = [tf.zeros(v.shape, v.dtype) for v in graph.variables]
        self.variables = [
            value.in_variables()
            if isinstance(value, quantized.Quantized)
            else tf.Variable(tf.cast(value, variable.dtype), trainable=False)
            for value, variable in zip(
                values or empty, graph.variables, strict=True
            )
        ]
        self._graph = graph

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether these values are quantized as those that it holds."""
        return quantized.forms(values) == quantized.forms(self.variables)

    def install(self, values: Iterable[Any]) -> None:
        """Puts values in place, each in its variable's precision."""
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(variable, quantized.Quantized):
                variable.assign(value)
            else:
                variable.assign(tf.cast(value, variable.dtype))

    def infer(self, inputs: Any) -> list[tf.Tensor]:
        """Runs the values in use, in the step."""
        return self.try_out(self.variables, inputs)

    def try_out(self, values: Sequence[Any], inputs: Any) -> list[tf.Tensor]:
        """Runs other values, outside of the step."""
        return keras.tree.flatten(self._graph(values, inputs))

    def read(
        self, version: versions.Version, expected: Mapping[str, Any]
    ) -> saved_model.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return saved_model.read_variables(version.path, expected, widen=False)
