"""FeatureEmbedding: keras-rs' configurations of tables, on sharded tables."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import layer as sharded
from tfdistill.embedding import rows as table_rows

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
    inputs and outputs of the same structure. Tables with equal `embedding_dim`
    and initializer are stacked: they become fields of one `ShardedEmbedding`
    and are looked up at once, so the cost of a step depends on its ids, not on
    the number of tables. The optimizer of `compile` updates the tables, row by
    row; keras-rs must be installed (`pip install tfdistill[recommenders]`).

    `max_ids_per_partition` and `max_unique_ids_per_partition` are for
    accelerators and change nothing here.

    Attributes:
        stacks: The tables, each a `ShardedEmbedding` of one or more.
        tables: By the name of a `TableConfig`: the index in `stacks` of the
            stack that has the table, and of its field there.

    Example:
        >>> import keras_rs
        >>> of = keras_rs.layers
        >>> words = of.TableConfig("words", 100, 4)
        >>> query = of.FeatureConfig("query", words, (2, 3), (2, 4))
        >>> layer = FeatureEmbedding([query])
        >>> layer([keras.ops.ones([2, 3], "int32")])[0].shape.as_list()
        [2, 4]
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        sharding: str = "hash",
        num_shards: int | None = None,
        oov_index: int | None = None,
        **kwargs: object,
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
            ValueError: A configuration asks for something that these tables
                don't support.
        """
        super().__init__(**kwargs)
        self.supports_jit = False
        self._options: dict[str, Any] = {
            "sharding": sharding,
            "num_shards": num_shards,
            "oov_index": oov_index,
        }
        self._features = _Features(feature_configs)
        configs: dict[str, Any] = {}
        by_kind: dict[Any, list[Any]] = {}
        for feature in keras.tree.flatten(feature_configs):
            _check_feature(feature)
            table = feature.table
            config = table.get_config()
            if configs.setdefault(table.name, config) != config:
                raise ValueError(
                    "Each table must have its own name; received two different "
                    f"tables named {table.name!r}. Features share a table by "
                    "naming the same TableConfig."
                )
            stack = by_kind.setdefault(_kind(table), [])
            if all(table.name != other.name for other in stack):
                stack.append(table)
        self.stacks = [
            sharded.ShardedEmbedding(
                [table.vocabulary_size for table in stack],
                stack[0].embedding_dim,
                embeddings_initializer=stack[0].initializer,
                name=stack[0].name,
                dtype=self.dtype_policy,
                **self._options,
            )
            for stack in by_kind.values()
        ]
        for layer, stack in zip(self.stacks, by_kind.values(), strict=True):
            layer.fields.names = [table.name for table in stack]
        self.tables = {
            table.name: (index, field)
            for index, stack in enumerate(by_kind.values())
            for field, table in enumerate(stack)
        }

    def build(self, input_shape: object = None) -> None:
        """Makes the tables."""
        for stack in self.stacks:
            stack.build()
        self.built = True

    def call(
        self,
        inputs: object,
        weights: object = None,
        training: bool | None = None,
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
            ValueError: There are weights, or the structure differs from the
                configurations.
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

        flat = list(
            zip(
                keras.tree.flatten(features),
                keras.tree.flatten(inputs),
                strict=True,
            )
        )
        found: dict[int, Any] = {}
        for index, stack in enumerate(self.stacks):
            own = {
                place: (ids, field)
                for place, (feature, ids) in enumerate(flat)
                for number, field in [self.tables[feature.table.name]]
                if number == index
            }
            vectors = _looked_up(stack, list(own.values()), training)
            found.update(zip(own, vectors, strict=True))
        return keras.tree.pack_sequence_as(
            features,
            [
                table_rows.combine(found[place], feature.table.combiner)
                if ids.shape.rank > 1
                else found[place]  # One id is a bag by itself.
                for place, (feature, ids) in enumerate(flat)
            ],
        )

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


def _looked_up(
    stack: sharded.ShardedEmbedding,
    ids_and_fields: Sequence[tuple[Any, int]],
    training: bool | None,
) -> list[Any]:
    """Looks up ids of fields by number, all at once, without a combiner.

    Each is int32 or int64, dense or ragged, `[batch]` or `[batch, k]`. Returned
    are floats of these shapes, with `dim` behind.
    """
    flat = []
    for ids, _ in ids_and_fields:
        sharded.check_ids(ids, stack.name)
        is_ragged = isinstance(ids, tf.RaggedTensor)
        flat.append(ids.flat_values if is_ragged else tf.reshape(ids, [-1]))
    sizes = [tf.size(ids) for ids in flat]
    in_table = stack.fields.in_table(
        tf.concat([tf.cast(ids, tf.int64) for ids in flat], axis=0),
        tf.repeat([field for _, field in ids_and_fields], sizes),
        owner=stack.table.owner,
    )
    rows = stack.table.stored(in_table)
    vectors = stack.table.gathered(rows, training, stack.compute_dtype)
    return [
        sharded.with_vectors(ids, part, stack.output_dim)
        for (ids, _), part in zip(
            ids_and_fields, tf.split(vectors, sizes), strict=True
        )
    ]


def _kind(table: Any) -> Any:
    """What tables of one stack have in common."""
    initializer = keras.initializers.get(table.initializer)
    is_scaled = isinstance(initializer, keras.initializers.VarianceScaling)
    if is_scaled and initializer.mode != "fan_out":
        return table.name  # The variance follows from the number of rows.
    config = keras.saving.serialize_keras_object(initializer)
    if isinstance(config, dict) and isinstance(config.get("config"), dict):
        # A stack has one seed: no two of its rows are drawn alike.
        config["config"] = {**config["config"], "seed": None}
    return table.embedding_dim, json.dumps(config, sort_keys=True, default=str)


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
            f"for {table.name!r}. Pass the optimizer to `compile`."
        )
    if table.placement == "sparsecore":
        raise ValueError(
            "`placement` must be 'auto' or 'default_device': these tables are "
            "stored on parameter servers or workers; received "
            f"{table.placement!r} for {table.name!r}."
        )
    if feature.output_shape[-1] != table.embedding_dim:
        raise ValueError(
            "The `output_shape` of a feature must end in the `embedding_dim` "
            f"of its table, {table.embedding_dim}; received "
            f"{feature.output_shape} for {feature.name!r}."
        )
