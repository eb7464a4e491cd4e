"""The network for click logs: embeddings and a fully connected tower."""

from collections.abc import Sequence

import keras

from models import criteo_options
from models import criteo_rows
from tfdistill import embedding as embedding_lib

__all__ = ["build_model"]


def build_model(
    *,
    field_sizes: int | Sequence[int] = criteo_options.DEFAULT_FIELD_SIZE,
    embedding_dim: int = 16,
    hidden_units: Sequence[int] = (2560, 1024, 256),
    name: str = "criteo",
) -> keras.Model:
    """Returns a tower over the integers and an embedding of each category.

    The default layers are those of Anil et al. 2018 (arXiv:1804.03235) for
    this data: 2560, 1024 and 256 ReLU units, and one logit.

    Args:
        field_sizes: Rows of the table of each category column, or one number
            for all; as for `make_datasets`. Default 10,000.
        embedding_dim: Numbers a category is embedded in, >= 1. Default 16.
        hidden_units: Units of each hidden layer. Default (2560, 1024, 256).
        name: Name of the model.

    Returns:
        A model from `{"integers": float32 [batch, 13], "categories": int32
        [batch, 26]}` to float32 logits `[batch, 1]`.

    Raises:
        ValueError: If an argument is out of range.
    """
    sizes = criteo_options.checked_field_sizes(field_sizes)
    if embedding_dim < 1 or any(units < 1 for units in hidden_units):
        raise ValueError(
            "`embedding_dim` and each of `hidden_units` must be >= 1; received "
            f"{embedding_dim} and {hidden_units}."
        )
    integers = keras.Input((criteo_rows.NUM_INTEGERS,), name="integers")
    categories = keras.Input(
        (criteo_rows.NUM_CATEGORIES,), dtype="int32", name="categories"
    )
    embedding = embedding_lib.ShardedEmbedding(
        sizes,
        embedding_dim,
        oov_index=criteo_rows.RARE_ROW,
        name="embedding",
    )
    embedded = keras.layers.Flatten()(embedding(categories))
    x = keras.layers.Concatenate()([integers, embedded])
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
    # float32 even under a mixed policy: losses want exact logits.
    logit = keras.layers.Dense(1, dtype="float32", name="logit")(x)
    inputs = {"integers": integers, "categories": categories}
    return keras.Model(inputs, logit, name=name)
