"""FeatureEmbedding: keras-rs' configurations of tables, on sharded tables."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import layer as sharded

# What a `TableConfig` has if it was given no optimizer.
_NO_OPTIMIZER = "adam"


@dataclasses.dataclass(frozen=True)
class _Features:
    """A structure that Keras does not track, as it would change its types."""

    structure: Any


@keras.saving.register_keras_serializable(package="tfdistill")
class FeatureEmbedding(keras.layers.Layer):
    """Looks features up in `ShardedEmbedding` tables, as keras-rs describes.

    It takes the configurations of a `keras_rs.layers.DistributedEmbedding`, and
    inputs and outputs of the same structure. Each `TableConfig` becomes one
    `ShardedEmbedding`, which all features that name it share. The optimizer of
    `compile` updates the tables, row by row; keras-rs must be installed
    (`pip install tfdistill[recommenders]`).

    `max_ids_per_partition` and `max_unique_ids_per_partition` are for
    accelerators and change nothing here.

    Attributes:
        tables: The `ShardedEmbedding` of each table, by its name.

    Example:
        >>> import keras_rs
        >>> of = keras_rs.layers
        >>> words = of.TableConfig("words", 100, 4)
        >>> query = of.FeatureConfig("query", words, (2, 3), (2, 4))
        >>> layer = FeatureEmbedding([query])
        >>> layer([tf.ones([2, 3], tf.int32)])[0].shape.as_list()
        [2, 4]
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        sharding: str = "hash",
        num_shards: int | None = None,
        oov_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes a table for each `TableConfig`.

        Args:
            feature_configs: A structure, nested at will, of
                `keras_rs.layers.FeatureConfig`.
            sharding: As for `ShardedEmbedding`, of every table.
            num_shards: As for `ShardedEmbedding`, of every table.
            oov_index: As for `ShardedEmbedding`, of every table.
            **kwargs: As for `keras.layers.Layer`.

        Raises:
            ImportError: keras-rs is not installed.
            ValueError: A configuration asks for what these tables have not.
        """
        super().__init__(**kwargs)
        self.supports_jit = False
        self._options: dict[str, Any] = {
            "sharding": sharding,
            "num_shards": num_shards,
            "oov_index": oov_index,
        }
        self._features = _Features(feature_configs)
        self.tables: dict[str, sharded.ShardedEmbedding] = {}
        configs: dict[str, Any] = {}
        for feature in keras.tree.flatten(feature_configs):
            _check_feature(feature)
            table = feature.table
            config = table.get_config()
            if configs.setdefault(table.name, config) != config:
                raise ValueError(
                    "Tables must have names of their own; received two that "
                    f"differ, named {table.name!r}. Features share a table by "
                    "naming the same TableConfig."
                )
            if table.name not in self.tables:
                self.tables[table.name] = sharded.ShardedEmbedding(
                    table.vocabulary_size,
                    table.embedding_dim,
                    embeddings_initializer=table.initializer,
                    combiner=table.combiner,
                    name=table.name,
                    dtype=self.dtype_policy,
                    **self._options,
                )

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        for table in self.tables.values():
            if not table.built:
                table.build()
        self.built = True

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """Looks up each feature and reduces its vectors to one.

        Args:
            inputs: The structure of the configurations. Each int32 or int64:
                dense `[batch]`, one id for an example; dense `[batch, k]`; or
                ragged `[batch, (k)]`.
            weights: Must be None.
            training: As for `ShardedEmbedding`.

        Returns:
            The same structure of floats `[batch, dim]`.

        Raises:
            ValueError: There are weights, or the structure is another one.
        """
        if weights is not None:
            raise ValueError(
                "`weights` must be None: the tables of tfdistill combine ids "
                "of equal weight; received weights. Look the ids up with a "
                "layers.ShardedEmbedding without `combiner`, and combine "
                "its vectors."
            )
        features = self._features.structure
        keras.tree.assert_same_structure(features, inputs)

        def look_up(feature: Any, ids: Any) -> tf.Tensor:
            if len(ids.shape) == 1:  # A bag of one for each example.
                ids = tf.expand_dims(ids, -1)
            return self.tables[feature.table.name](ids, training=training)

        return keras.tree.map_structure(look_up, features, inputs)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        flat = keras.tree.flatten(self._features.structure)
        return {
            **super().get_config(),
            **self._options,
            "features": [feature.get_config() for feature in flat],
            "structure": keras.tree.pack_sequence_as(
                self._features.structure, list(range(len(flat)))
            ),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FeatureEmbedding":
        """Makes the layer from `get_config`."""
        config = dict(config)
        make = _keras_rs_layers().FeatureConfig.from_config
        features = [make(feature) for feature in config.pop("features")]
        structure = keras.tree.map_structure(
            lambda index: features[index], config.pop("structure")
        )
        return cls(structure, **config)


def _keras_rs_layers() -> Any:
    try:
        from keras_rs import layers
    except ImportError as cause:
        raise ImportError(
            "FeatureEmbedding needs keras-rs, whose TableConfig and "
            "FeatureConfig it takes: pip install tfdistill[recommenders]."
        ) from cause
    return layers


def _check_feature(feature: Any) -> None:
    if not isinstance(feature, _keras_rs_layers().FeatureConfig):
        raise ValueError(
            "`feature_configs` must be a structure of "
            f"keras_rs.layers.FeatureConfig; received {feature!r}. A table "
            "without features is a tfdistill.layers.ShardedEmbedding."
        )
    table = feature.table
    if table.optimizer != _NO_OPTIMIZER:
        raise ValueError(
            "A TableConfig must leave `optimizer` out, since the optimizer of "
            f"`compile` updates the tables, too; received {table.optimizer!r} "
            f"for {table.name!r}. Give it to `compile`."
        )
    if table.placement == "sparsecore":
        raise ValueError(
            "`placement` must be 'auto' or 'default_device': these tables lie "
            f"on parameter servers or workers; received {table.placement!r} "
            f"for {table.name!r}."
        )
    if feature.output_shape[-1] != table.embedding_dim:
        raise ValueError(
            "The `output_shape` of a feature must end in the `embedding_dim` "
            f"of its table, {table.embedding_dim}; received "
            f"{feature.output_shape} for {feature.name!r}."
        )
