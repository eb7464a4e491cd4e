"""The DLRM network over Criteo's columns, of keras-rs' layers."""

from collections.abc import Sequence

import keras

import tfdistill
from models.criteo import converted
from models.criteo import rows


def build_dlrm(
    *,
    field_sizes: int | Sequence[int] = converted.DEFAULT_FIELD_SIZE,
    embedding_dim: int = 16,
    bottom_units: Sequence[int] = (512, 256, 64),
    top_units: Sequence[int] = (512, 256),
    name: str = "criteo_dlrm",
) -> keras.Model:
    """Returns the deep learning recommendation model of Naumov et al. 2019.

    arXiv:1906.00091: a tower over the integers ends in a vector as long as an
    embedding; the dot products of all pairs of these vectors and the tower's
    output go into a second tower. The default sizes are those that the authors
    publish for this data. Needs keras-rs (`tfdistill[recommenders]`), and
    so does who loads a file of the model: `import keras_rs` before.

    Args:
        field_sizes: Rows of the table of each category column, or one number
            for all; as for `make_datasets`. Default 10,000.
        embedding_dim: Numbers a category is embedded in, >= 1. Default 16.
        bottom_units: Units of the hidden layers below the products, before
            the one of `embedding_dim` units. Default (512, 256, 64).
        top_units: Units of the hidden layers above. Default (512, 256).
        name: Name of the model.

    Returns:
        A model from `{"integers": float32 [batch, 13], "categories": int32
        [batch, 26]}` to float32 logits `[batch, 1]`.

    Raises:
        ValueError: If an argument is out of range, or keras-rs is missing.
    """
    try:
        from keras_rs import layers as recommender_layers
    except ImportError as cause:
        raise ValueError(
            "The model criteo_dlrm needs keras-rs, which is not installed: "
            "pip install tfdistill[recommenders]."
        ) from cause
    sizes = converted.checked_field_sizes(field_sizes)
    if min([embedding_dim, *bottom_units, *top_units]) < 1:
        raise ValueError(
            "`embedding_dim` and each of `bottom_units` and `top_units` must "
            f"be >= 1; received {embedding_dim}, {bottom_units} and "
            f"{top_units}."
        )
    integers = keras.Input((rows.NUM_INTEGERS,), name="integers")
    categories = keras.Input(
        (rows.NUM_CATEGORIES,), dtype="int32", name="categories"
    )
    bottom = integers
    for units in (*bottom_units, embedding_dim):
        bottom = keras.layers.Dense(units, activation="relu")(bottom)
    embedded = tfdistill.layers.ShardedEmbedding(
        sizes, embedding_dim, oov_index=rows.RARE_ROW, name="embedding"
    )(categories)
    products = recommender_layers.DotInteraction(name="products")(
        [bottom, *keras.ops.unstack(embedded, axis=1)]
    )
    top = keras.layers.Concatenate()([bottom, products])
    for units in top_units:
        top = keras.layers.Dense(units, activation="relu")(top)
    # float32 even under a mixed policy: losses want exact logits.
    logit = keras.layers.Dense(1, dtype="float32", name="logit")(top)
    inputs = {"integers": integers, "categories": categories}
    return keras.Model(inputs, logit, name=name)
