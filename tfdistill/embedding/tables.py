"""A model's tables, each as one variable: for graphs, files and backups."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import layer as embedding_layer
from tfdistill.system import keras_internals


def layers_of(model: keras.Layer) -> list[embedding_layer.ShardedEmbedding]:
    """Returns all sharded embeddings of a model, nested ones too, each once.

    In the order in which Keras finds them.
    """
    found = {
        id(layer): layer
        for layer in keras_internals.all_layers(model)
        if isinstance(layer, embedding_layer.ShardedEmbedding)
    }
    return list(found.values())


# The order of a table whose rows lie where their ids were put.
BY_ID = "by_id"


def order_of(layer: embedding_layer.ShardedEmbedding) -> dict[str, Any]:
    """Returns, as JSON, what the stored order of a table's ids follows from."""
    return {
        "name": f"{layer.path}/table",
        "sizes": np.atleast_1d(layer.input_dim).tolist(),
        "sharding": BY_ID if layer.layout.unit > 1 else layer.layout.sharding,
    }


class LogicalTable:
    """The shards of one table, seen as one Keras variable in stored order."""

    def __init__(self, layer: embedding_layer.ShardedEmbedding) -> None:
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
    """Returns a built model's variables, one for each table.

    A `LogicalTable` stands in the place of the first shard of each table.
    """
    layers = {
        id(shard): layer for layer in layers_of(model) for shard in layer.shards
    }
    found: list[Any] = []
    for variable in model.variables:
        layer = layers.get(id(variable))
        if layer is None:
            found.append(variable)
        elif variable is layer.shards[0]:
            found.append(LogicalTable(layer))
    return found


def parts_of(variable: Any) -> list[Any]:
    """Returns the Keras variables of one of a graph: a table has shards."""
    is_table = isinstance(variable, LogicalTable)
    return list(variable.layer.shards) if is_table else [variable]


def by_part(variable: Any, value: tf.Tensor) -> list[tuple[Any, tf.Tensor]]:
    """Returns the Keras variables of one of a graph, each with its rows."""
    parts = parts_of(variable)
    if len(parts) == 1:
        return [(parts[0], value)]
    rows = tf.split(value, [int(part.shape[0]) for part in parts])
    return list(zip(parts, rows, strict=True))


def assign(
    variable: Any, value: tf.Tensor, strategy: tf.distribute.Strategy
) -> None:
    """Gives one of a graph's variables a value, on all of this task's replicas.

    A table's value has all of its rows.
    """
    for part, rows in by_part(variable, value):
        for copy in strategy.experimental_local_results(part.value):
            copy.assign(rows)
