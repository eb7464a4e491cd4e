"""A sharded table as one variable, for what must not know of shards."""

from typing import Any

import keras
import tensorflow as tf

from tfdistill import embedding


class LogicalTable:
    """The shards of one table, seen as one variable in stored order.

    Attributes:
        layer: The `ShardedEmbedding`.
        shape: `[num_rows, dim]`.
        dtype: Name of the dtype of the shards.
        path: As for a Keras variable.
    """

    def __init__(self, layer: embedding.ShardedEmbedding) -> None:
        """Describes the table of a built layer."""
        self.layer = layer
        self.shape = tf.TensorShape([layer.layout.num_rows, layer.output_dim])
        self.dtype = layer.variable_dtype
        self.path = f"{layer.path}/table"

    @property
    def is_on_servers(self) -> bool:
        """Whether the shards lie on parameter servers."""
        return any("/job:ps" in s.value.device for s in self.layer.shards)

    @property
    def value(self) -> tf.Tensor:
        """The whole table, on the caller's device."""
        shards = [tf.convert_to_tensor(s.value) for s in self.layer.shards]
        return shards[0] if len(shards) == 1 else tf.concat(shards, axis=0)


def variables_of(model: keras.Model) -> list[Any]:
    """Returns a model's variables, one for each table.

    Args:
        model: A built model.

    Returns:
        Keras variables, and a `LogicalTable` in the place of the first shard
        of each table.
    """
    layers = {
        id(shard): layer
        for layer in embedding.layers_of(model)
        for shard in layer.shards
    }
    found: list[Any] = []
    for variable in model.variables:
        layer = layers.get(id(variable))
        if layer is None:
            found.append(variable)
        elif variable is layer.shards[0]:
            found.append(LogicalTable(layer))
    return found
