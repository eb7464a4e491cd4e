"""Small models with sharded tables, and data for them."""

from typing import Any

import keras
import numpy as np

from tfdistill.embedding import layer as embedding_layer

FIELDS = (13, 5, 8)
DIM = 4


def table(layer: Any) -> np.ndarray:
    """The whole table in stored order."""
    return np.concatenate([shard.numpy() for shard in layer.shards])


def data(num_examples: int = 27) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[n, fields]`, some of them often, and values `[n, 1]`."""
    rng = np.random.default_rng(7)
    ids = np.stack(
        [rng.zipf(1.5, num_examples) % size for size in FIELDS], axis=1
    ).astype("int32")
    return ids, (ids.sum(axis=1, keepdims=True) / 10).astype("float32")


def model(
    model_class: type = keras.Model, num_shards: int | None = None
) -> keras.Model:
    """A table for three fields, looked up twice, below a dense layer."""
    inputs = keras.Input((len(FIELDS),), dtype="int32")
    layer = embedding_layer.ShardedEmbedding(
        FIELDS,
        DIM,
        num_shards=num_shards,
        embeddings_initializer=keras.initializers.RandomUniform(seed=5),
        name="table",
    )
    first = keras.layers.Flatten()(layer(inputs))
    # The last two fields once more, in each other's place and in range.
    again = layer(keras.ops.minimum(inputs[:, ::-1], 4))
    joined = keras.layers.Concatenate()([first, keras.layers.Flatten()(again)])
    kernel = keras.initializers.GlorotUniform(seed=1)
    return model_class(
        inputs, keras.layers.Dense(1, kernel_initializer=kernel)(joined)
    )
