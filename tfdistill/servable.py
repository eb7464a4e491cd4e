"""What a student's SavedModel holds: its variables and how to call it."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import logical_table
from tfdistill import specs
from tfdistill import student_graph


class Servable(tf.Module):
    """What the SavedModel holds: variables, `serve` and a signature."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        values: Sequence[tf.Tensor | None],
        *,
        dtypes: Sequence[tf.DType],
    ) -> None:
        """Makes the variables; traces nothing yet.

        Args:
            graph: The student's traced inference.
            values: One for each of its variables; None stands for a table on
                parameter servers, whose values are written another way.
            dtypes: Of the variables, as they are stored.
        """
        super().__init__()
        with tf.init_scope():
            self.model_variables = [
                _stand_in(variable, dtype)
                if value is None
                else tf.Variable(value, trainable=False, name=variable.path)
                for value, variable, dtype in zip(
                    values, graph.variables, dtypes, strict=True
                )
            ]
        # A SavedModel holds a table only where an attribute leads to it.
        self.tables = list(graph.tables)
        self._graph = graph
        self.serve = tf.function(
            lambda inputs: graph(self.model_variables, inputs),
            input_signature=[graph.input_spec],
            autograph=False,
        )

    def signature(self) -> Any:
        """`serving_default`, in the flat form that signatures must have."""
        flat = specs.names(self._graph.input_spec, "inputs")

        @tf.function(autograph=False)
        def serving_default(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            inputs = keras.tree.pack_sequence_as(
                self._graph.input_spec, [tensors[name] for name in flat]
            )
            outputs = self.serve(inputs)
            return specs.named(outputs, "outputs")

        return serving_default.get_concrete_function(
            **{
                name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
                for name, spec in specs.named(
                    self._graph.input_spec, "inputs"
                ).items()
            }
        )


def _stand_in(
    table: logical_table.LogicalTable, dtype: tf.DType
) -> tf.Variable:
    """A variable of one row, in a graph that holds for any number of them."""
    dim = table.shape[1]
    return tf.Variable(
        tf.zeros([1, dim], dtype),
        shape=tf.TensorShape([None, dim]),
        trainable=False,
        name=table.path,
    )
