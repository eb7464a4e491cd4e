"""Networks over Criteo's columns: the paper's layers, and a DLRM."""

from collections.abc import Sequence

import keras

import tfdistill
from models import dlrm
from models.criteo import converted
from models.criteo import rows


def build_model(
    *,
    field_sizes: int | Sequence[int] = converted.DEFAULT_FIELD_SIZE,
    embedding_dim: int = 16,
    hidden_units: Sequence[int] = (2560, 1024, 256),
) -> keras.Model:
    """Returns a tower over the integers and an embedding of each category.

    The default layers are from Anil et al. 2018 (arXiv:1804.03235) for
    this data: 2560, 1024 and 256 ReLU units, and one logit.

    Args:
        field_sizes: Rows of the table of each category column, or one number
            for all; as for `make_datasets`. Default 10,000.
        embedding_dim: Numbers a category is embedded in, >= 1. Default 16.
        hidden_units: Units of each hidden layer. Default (2560, 1024, 256).

    Returns:
        A model from `{"integers": float32 [batch, 13], "categories": int32
        [batch, 26]}` to float32 logits `[batch, 1]`.
    """
    inputs = _inputs(embedding_dim, hidden_units)
    embedded = _embedded(inputs["categories"], field_sizes, embedding_dim)
    flat = keras.layers.Flatten()(embedded)
    x = keras.layers.Concatenate()([inputs["integers"], flat])
    return keras.Model(inputs, dlrm.logit(x, hidden_units), name="criteo")


def build_dlrm(
    *,
    field_sizes: int | Sequence[int] = converted.DEFAULT_FIELD_SIZE,
    embedding_dim: int = 16,
    bottom_units: Sequence[int] = (512, 256, 64),
    top_units: Sequence[int] = (512, 256),
    num_crosses: int = 0,
    rank: int = 64,
) -> keras.Model:
    """Returns the deep learning recommendation model of Naumov et al. 2019.

    arXiv:1906.00091: a tower over the integers ends in a vector as long as an
    embedding; the dot products of all pairs of these vectors and the tower's
    output go into a second tower. The default sizes are those that the authors
    publish for this data. Products need keras-rs
    (`tfdistill[recommenders]`), and so does who loads a file of the model:
    `import keras_rs` before.

    With `num_crosses`, the cross layers of DCN-v2 are in the place of products;
    who loads a file of it imports `models.dlrm`.

    Args:
        field_sizes: Rows of the table of each category column, or one number
            for all; as for `make_datasets`. Default 10,000.
        embedding_dim: Numbers a category is embedded in, >= 1. Default 16.
        bottom_units: Units of the hidden layers below the products, before
            the one of `embedding_dim` units. Default (512, 256, 64).
        top_units: Units of the hidden layers above. Default (512, 256).
        num_crosses: Cross layers; 0, the default, for products.
        rank: Rank of the cross layers. Default 64.

    Returns:
        A model from `{"integers": float32 [batch, 13], "categories": int32
        [batch, 26]}` to float32 logits `[batch, 1]`.
    """
    inputs = _inputs(embedding_dim, (*bottom_units, *top_units))
    bottom = dlrm.dense(inputs["integers"], (*bottom_units, embedding_dim))
    embedded = _embedded(inputs["categories"], field_sizes, embedding_dim)
    if num_crosses:
        x = dlrm.crossed(bottom, embedded, num_crosses=num_crosses, rank=rank)
    else:
        x = _products(bottom, embedded)
    name = "criteo_dcn" if num_crosses else "criteo_dlrm"
    return keras.Model(inputs, dlrm.logit(x, top_units), name=name)


def _products(
    bottom: keras.KerasTensor, embedded: keras.KerasTensor
) -> keras.KerasTensor:
    try:
        from keras_rs import layers as recommender_layers
    except ImportError as cause:
        raise ValueError(
            "The model criteo_dlrm needs keras-rs, which is not installed: "
            "pip install tfdistill[recommenders]."
        ) from cause
    products = recommender_layers.DotInteraction(name="products")(
        [bottom, *keras.ops.unstack(embedded, axis=1)]
    )
    return keras.layers.Concatenate()([bottom, products])


def _inputs(
    embedding_dim: int, units: Sequence[int]
) -> dict[str, keras.KerasTensor]:
    if min([embedding_dim, *units]) < 1:
        raise ValueError(
            "`embedding_dim` and the units of each layer must be >= 1; "
            f"received {embedding_dim} and {tuple(units)}."
        )
    return {
        "integers": keras.Input((rows.NUM_INTEGERS,), name="integers"),
        "categories": keras.Input(
            (rows.NUM_CATEGORIES,), dtype="int32", name="categories"
        ),
    }


def _embedded(
    categories: keras.KerasTensor,
    field_sizes: int | Sequence[int],
    embedding_dim: int,
) -> keras.KerasTensor:
    return tfdistill.layers.ShardedEmbedding(
        converted.checked_field_sizes(field_sizes),
        embedding_dim,
        oov_index=rows.RARE_ROW,
        name="embedding",
    )(categories)
