"""Keras' own embeddings that are too large to travel whole to each step."""

import dataclasses

import keras
import tensorflow as tf

from tfdistill.system import keras_internals

# Above this many values a table costs more than all else of a usual step.
MAX_VALUES = 1_000_000

REMEDY = (
    "Use layers.ShardedEmbedding(input_dim, output_dim) in its place, which "
    "sends only the rows of a batch."
)


@dataclasses.dataclass(frozen=True)
class WholeTable:
    """A `keras.layers.Embedding` that parameter servers send whole."""

    name: str
    num_values: int
    num_bytes: int

    def __str__(self) -> str:
        """Says what it costs under parameter servers."""
        return (
            f"The layer {self.name!r} is a plain keras.layers.Embedding of "
            f"{self.num_values:,} values. Parameter servers send all of it, "
            f"{self.num_bytes / 1e6:.1f} MB, to a worker for each step, and "
            "take a gradient of the same size back"
        )


def whole_tables(model: keras.Layer) -> list[WholeTable]:
    """Returns the plain embeddings of a model with over `MAX_VALUES` values."""
    found = {}
    for layer in keras_internals.all_layers(model):
        if isinstance(layer, keras.layers.Embedding):
            size = layer.input_dim * layer.output_dim
            if size > MAX_VALUES:
                width = tf.as_dtype(layer.variable_dtype).size
                found[id(layer)] = WholeTable(layer.name, size, size * width)
    return list(found.values())
