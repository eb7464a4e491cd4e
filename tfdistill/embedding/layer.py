"""Layers that look ids up: what they have in common, and ShardedEmbedding."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import fields as field_ids
from tfdistill.embedding import pooling
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import tables

_COMBINERS = (None, "sum", "mean", "sqrtn", "fm")


class TableLookup(keras.layers.Layer):
    """Looks up a vector for each id in a table; a subclass finds the rows.

    Attributes:
        fields: What makes ids of the table, or keys, of each field's ids.
        table: Where the vectors are, a `Table`.
    """

    def __init__(
        self,
        ids: field_ids.FieldIds,
        layout: table_rows.RowLayout,
        output_dim: int,
        *,
        embeddings_initializer: tables.Initializer,
        combiner: str | None,
        num_shards: int | None,
        combine_on_servers: bool = False,
        **kwargs: object,
    ) -> None:
        """Makes the table, whose shards follow when the layer is built."""
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA has no distinct ids.
        if output_dim < 1:
            raise ValueError(
                f"`output_dim` must be >= 1; received {output_dim}. It is the "
                "length of each vector."
            )
        if combiner not in _COMBINERS:
            raise ValueError(
                f"`combiner` must be one of {_COMBINERS}; received "
                f"{combiner!r}. None gives a vector for each id."
            )
        if combine_on_servers and combiner is None:
            raise ValueError(
                "`combine_on_servers` must come with a `combiner`; received "
                'None. Name one, such as "sum".'
            )
        self.fields, self.output_dim, self.combiner = ids, output_dim, combiner
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self._num_shards = num_shards
        self.table = tables.Table(
            self, layout, output_dim, combines_there=combine_on_servers
        )

    @staticmethod
    def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
        """Checks that an optimizer can update rows, or variables on servers.

        Raises:
            ValueError: The optimizer can't; the message names the optimizers
                that can.
        """
        rules.check(optimizer)

    @property
    def layout(self) -> table_rows.RowLayout:
        """Where each row lies."""
        return self.table.layout

    @property
    def shards(self) -> list[Any]:
        """The table in stored order."""
        return self.table.shards

    def call(
        self, ids: tf.Tensor | tf.RaggedTensor, training: bool | None = None
    ) -> Any:
        """Looks up the vectors.

        Args:
            ids: int32 or int64. Dense, of any rank: `[..., fields]` if
                `input_dim` is a sequence, `[..., k]` with a combiner,
                `[..., fields, k]` with both, but `[..., fields]` with `"fm"`.
                Or ragged `[batch, (k)]`, if `input_dim` is an int.
            training: Only False skips the work that the gradient needs.

        Returns:
            Floats of the layer's compute dtype. The shape is the ids' shape
            (with a combiner, without the axis that it reduces), then `dim`,
            or 1 with `"fm"`. A bag without ids gives zeros.

        Raises:
            ValueError: Ids are floats or of a shape that does not fit.
        """
        check_ids(ids, self.name)
        is_ragged = isinstance(ids, tf.RaggedTensor)
        if is_ragged:
            self._check_ragged(ids)
            flat, fields = ids.flat_values, None
        else:
            flat, fields = ids, self._fields_of(ids)
        if self.table.sums_travel:
            return self._pooled(ids, flat, fields, training)
        vectors = self._vectors(flat, fields, training)
        vectors = with_vectors(ids, vectors, self.output_dim)
        return table_rows.combine(vectors, self.combiner)

    def compute_output_spec(self, *args: object, **kwargs: object) -> Any:
        """Returns the spec of the vectors; see `keras.Layer`.

        Ids are checked first: Keras puts another reason before what `call`
        raises here.
        """
        check_ids(kwargs["ids"] if "ids" in kwargs else args[0], self.name)
        return super().compute_output_spec(*args, **kwargs)

    def _fields_of(self, ids: tf.Tensor) -> tf.Tensor | None:
        axis = -1 if self.combiner in (None, "fm") else -2
        return self.fields.along(ids, axis, owner=f"layer {self.name!r}")

    def _check_ragged(self, ids: tf.RaggedTensor) -> None:
        if (
            self.fields.has_axis
            or ids.flat_values.shape.rank != 1
            or (self.combiner and ids.shape.rank != 2)
        ):
            raise ValueError(
                f"Ragged ids of the layer {self.name!r} must be [batch, (k)] "
                f"of one field; received {ids.shape}. Create a layer for each "
                "field."
            )

    def _vectors(
        self, ids: tf.Tensor, fields: tf.Tensor | None, training: bool | None
    ) -> tf.Tensor:
        """Returns the vectors of ids of any shape, `[number of ids, dim]`."""
        raise NotImplementedError

    def _pooled(
        self,
        ids: tf.Tensor | tf.RaggedTensor,
        flat: tf.Tensor,
        fields: tf.Tensor | None,
        training: bool | None,
    ) -> tf.Tensor:
        """Returns what servers reduce each bag to."""
        is_fm = self.combiner == "fm"
        if isinstance(ids, tf.RaggedTensor):
            bags = tf.cast(ids.value_rowids(), tf.int32)
            num_bags = tf.cast(ids.nrows(), tf.int32)
            sizes = ids.row_lengths()[:, tf.newaxis]
        else:
            if ids.shape[-1] is not None:
                self._warn_of_bytes(ids.shape[-1])
            shape, sizes = tf.shape(ids)[:-1], tf.shape(ids)[-1]
            num_bags = tf.reduce_prod(shape)
            bags = tf.repeat(tf.range(num_bags), sizes)
        self.table.num_lookups += 1
        ids_there = self.fields.in_table(flat, fields, owner=self.table.owner)
        sums = pooling.sums(
            self.table,
            self.table.stored(ids_there),
            bags,
            num_bags,
            squares=is_fm,
            differentiable=training is not False,
        )
        found = table_rows.combined(sums, sizes, str(self.combiner))
        found = tf.cast(found, self.compute_dtype)
        if isinstance(ids, tf.RaggedTensor):
            return found
        dim = 1 if is_fm else self.output_dim
        found = tf.reshape(found, tf.concat([shape, [dim]], axis=0))
        found.set_shape([*ids.shape[:-1], dim])
        return found

    def _warn_of_bytes(self, ids_per_bag: int) -> None:
        """Warns if sums of bags have more bytes than rows, all distinct."""
        width = self.output_dim + (self.combiner == "fm")
        by_rows = ids_per_bag * (4 + 8 * self.output_dim)
        by_sums = ids_per_bag * 4 + len(self.shards) * (4 + 8 * width)
        if by_sums >= by_rows:
            warnings.warn(
                f"`combine_on_servers` of the layer {self.name!r} should save "
                f"bytes, but a bag of {ids_per_bag} ids needs {by_sums} bytes "
                f"from {len(self.shards)} shards, and its rows at most "
                f"{by_rows}. Leave the option out.",
                stacklevel=2,
            )

    def save_own_variables(self, store: tables.Store) -> None:
        """Saves the table, whatever its shards."""
        self.table.save(store)

    def load_own_variables(self, store: tables.Store) -> None:
        """Loads the table, shard by shard."""
        self.table.load(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "combiner": self.combiner,
            "num_shards": self._num_shards,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


def check_ids(ids: tf.Tensor | tf.RaggedTensor, name: str) -> None:
    """Checks that ids of the layer of this name can be looked up."""
    is_sparse = isinstance(ids, tf.SparseTensor)
    if is_sparse or ids.dtype not in (tf.int32, tf.int64):
        raise ValueError(
            f"Ids of the layer {name!r} must be int32 or int64, dense or "
            f"ragged; received {type(ids).__name__} of {ids.dtype}. Give "
            "keras.Input the dtype of the ids."
        )


def with_vectors(
    ids: tf.Tensor | tf.RaggedTensor, vectors: tf.Tensor, dim: int
) -> Any:
    """Gives each of the ids, dense or ragged, its vector of `[number, dim]`."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(vectors)
    # Not -1 anywhere: a batch may be empty.
    vectors = tf.reshape(vectors, tf.concat([tf.shape(ids), [dim]], axis=0))
    vectors.set_shape([*ids.shape, dim])
    return vectors


@keras.saving.register_keras_serializable(package="tfdistill")
class ShardedEmbedding(TableLookup):
    """Looks up a vector for each id in a sharded table.

    Under `ParameterServerStrategy` each parameter server holds a shard;
    elsewhere the table is one variable, unless `num_shards` is given. Each
    distinct id of a batch is fetched once and its gradients are summed before
    they travel, so the cost of a step depends on the batch, not on the table.
    The initial values, the files and the results of training do not depend on
    the number of shards.

    One layer is one table. For one table per field, make one layer per
    field; for one table for many fields, give their sizes as `input_dim`.

    Momentum, and the moments of Adam, move only for the rows that a batch
    touches (the "lazy" form). `tfdistill.CodistillModel` and
    `DistributedModel` do that; in any other model Keras' own optimizer
    updates the table, at a cost that grows with it.

    Attributes:
        layout: Where each id's row lies, a `RowLayout`.
        shards: The table in stored order: trainable variables `[rows, dim]`.

    Example:
        >>> layer = ShardedEmbedding([100, 7], 4)
        >>> layer(tf.constant([[99, 0], [3, 6]])).shape.as_list()
        [2, 2, 4]
        >>> bags = ShardedEmbedding(100, 4, combiner="mean")
        >>> bags(tf.ragged.constant([[5, 7], [], [5]])).shape.as_list()
        [3, 4]
    """

    def __init__(
        self,
        input_dim: int | Sequence[int],
        output_dim: int,
        *,
        embeddings_initializer: tables.Initializer = "uniform",
        combiner: str | None = None,
        combine_on_servers: bool = False,
        sharding: str = "hash",
        num_shards: int | None = None,
        oov_index: int | None = None,
        **kwargs: object,
    ) -> None:
        """Makes the layer; the table follows when it is built.

        Args:
            input_dim: Number of ids. A sequence: the number of ids of each
                field; ids are then `[..., fields]`, or `[..., fields, k]`
                with a combiner but `"fm"`, and each field's ids count from 0.
            output_dim: Length of a vector.
            embeddings_initializer: As in `keras.layers.Embedding`. It makes
                one block of about 4 million values at a time, each by a seed
                that follows from the initializer's own, or from
                `keras.utils.set_random_seed`.
            combiner: Reduces the vectors of each bag of ids to one: `"sum"`,
                `"mean"`, or `"sqrtn"` (the sum over the square root of the
                number of ids). Bags are the rows of ragged ids, or the last
                axis of dense ones. `"fm"` reduces them to one number, the
                second-order term of a factorization machine: the sum over all
                pairs of their vectors' inner products. Defaults to None: a
                vector for each id.
            combine_on_servers: Whether servers reduce the vectors of the bags
                that they hold, so that sums travel and no rows: 4 bytes an id,
                and for each bag and shard 4, and 8 for each number of a sum. By
                default each distinct id of a batch costs 4 bytes, and 8 for
                each number of a vector. Elsewhere it changes nothing.
            sharding: `"hash"` (default) or `"contiguous"`; see `RowLayout`.
            num_shards: Defaults to the number of parameter servers, or 1.
            oov_index: The id, in each field, that stands for negative ids and
                those out of range. By default such ids are an error.
            **kwargs: As for `keras.layers.Layer`, such as `name` and `dtype`.

        Raises:
            ValueError: An argument is out of its range.
        """
        ids = field_ids.FieldIds(input_dim, oov_index=oov_index)
        layout = table_rows.RowLayout(
            ids.num_rows, sharding=sharding, num_shards=num_shards or 1
        )
        super().__init__(
            ids,
            layout,
            output_dim,
            embeddings_initializer=embeddings_initializer,
            combiner=combiner,
            combine_on_servers=combine_on_servers,
            num_shards=num_shards,
            **kwargs,
        )
        self.table.sizes = ids.sizes
        self.input_dim = ids.sizes if ids.has_axis else ids.sizes[0]
        self.combine_on_servers = combine_on_servers

    def build(self, input_shape: object = None) -> None:
        """Makes the shards and fills them, each where it lives."""
        self.table.make(
            self.embeddings_initializer, num_shards=self._num_shards
        )
        self.built = True

    def _vectors(
        self, ids: tf.Tensor, fields: tf.Tensor | None, training: bool | None
    ) -> tf.Tensor:
        ids = self.fields.in_table(ids, fields, owner=self.table.owner)
        rows = self.table.stored(ids)
        return self.table.gathered(rows, training, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "combine_on_servers": self.combine_on_servers,
            "sharding": self.layout.sharding,
            "oov_index": self.fields.oov_index,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ShardedEmbedding":
        """Makes the layer from `get_config`, of earlier releases, too."""
        config = {k: v for k, v in config.items() if k != "field_names"}
        return super().from_config(config)
