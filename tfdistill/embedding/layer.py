"""ShardedEmbedding: a table for ids that lies in shards."""

import contextlib
import functools
import operator
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import fields
from tfdistill.embedding import pooling
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import sources
from tfdistill.embedding import values as initial
from tfdistill.system import keras_internals

_COMBINERS = (None, "sum", "mean", "sqrtn", "fm")


@keras.saving.register_keras_serializable(package="tfdistill")
class ShardedEmbedding(keras.layers.Layer):
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
        num_lookups: How often the layer was called, traces included.

    Example:
        >>> layer = ShardedEmbedding([100, 7], 4)
        >>> layer(tf.constant([[99, 0], [3, 6]])).shape.as_list()
        [2, 2, 4]
        >>> bags = ShardedEmbedding(100, 4, combiner="mean")
        >>> bags(tf.ragged.constant([[5, 7], [], [5]])).shape.as_list()
        [3, 4]
    """

    # Whether its values are what training is for.
    _is_trained = True

    def __init__(
        self,
        input_dim: int | Sequence[int],
        output_dim: int,
        *,
        embeddings_initializer: Any = "uniform",
        combiner: str | None = None,
        combine_on_servers: bool = False,
        sharding: str = "hash",
        num_shards: int | None = None,
        oov_index: int | None = None,
        field_names: Sequence[str] | None = None,
        **kwargs: Any,
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
            field_names: What errors call the fields. Defaults to numbers.
            **kwargs: As for `keras.layers.Layer`, such as `name` and `dtype`.

        Raises:
            ValueError: An argument is out of its range.
        """
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
        sizes = [operator.index(size) for size in np.atleast_1d(input_dim)]
        self._has_fields = np.ndim(input_dim) > 0
        self.input_dim = sizes if self._has_fields else sizes[0]
        self._ids = fields.FieldIds(
            sizes, oov_index=oov_index, names=field_names
        )
        self.output_dim = output_dim
        self.combiner = combiner
        self.combine_on_servers = combine_on_servers
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.layout = table_rows.RowLayout(
            self._ids.num_rows, sharding=sharding, num_shards=num_shards or 1
        )
        self.shards: list[Any] = []
        # For each shard, by name: variables that go with it into backups.
        self.slots: list[Mapping[str, tf.Variable]] = []
        self.num_lookups = 0
        self._num_shards = num_shards
        self._oov_index = oov_index
        self._field_names = field_names and list(field_names)
        self._on_devices = False

    def _beside(self, shard: int) -> contextlib.AbstractContextManager[Any]:
        """Where the variable of a shard is made."""
        return contextlib.nullcontext()

    @staticmethod
    def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
        """Checks that an optimizer can update rows, or variables on servers.

        Raises:
            ValueError: The optimizer can't; the message names the optimizers
                that can.
        """
        rules.rule_for(optimizer)

    def build(self, input_shape: Any = None) -> None:
        """Makes the shards and fills them, each where it lives."""
        jobs = keras_internals.jobs_of(tf.distribute.get_strategy())
        num_servers = len(jobs.get("ps", ()))
        self._on_devices = num_servers > 0
        num_shards = self._num_shards or min(
            max(num_servers, 1), self.layout.most_shards
        )
        self.layout = self.layout.with_shards(num_shards)
        values = initial.TableValues(
            self.embeddings_initializer,
            layout=self.layout,
            dim=self.output_dim,
            seed=initial.seed_of(self.embeddings_initializer),
        )
        zeros = isinstance(
            self.embeddings_initializer, keras.initializers.Zeros
        )
        # No server holds its shard twice, not even at first. In a trace, a
        # variable gets its values only when that has ended.
        in_place = self._on_devices and tf.executing_eagerly()
        for shard, num_rows in enumerate(self.layout.shard_sizes):
            with self._beside(shard):
                variable = self.add_weight(
                    shape=(num_rows, self.output_dim),
                    initializer="zeros"
                    if in_place or zeros
                    else functools.partial(values.of_shard, shard),
                    trainable=self._is_trained,
                    autocast=False,
                    name="table" if num_shards == 1 else f"table_{shard}",
                )
            if in_place and not zeros:
                values.fill(shard, variable.value)
            self.shards.append(variable)
        self.built = True

    def call(self, ids: Any, training: bool | None = None) -> Any:
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
        self.num_lookups += 1
        self._check_ids(ids)
        if isinstance(ids, tf.RaggedTensor):
            return self._call_ragged(ids, training)
        return self._call_dense(ids, training)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the spec of the vectors; see `keras.Layer`.

        Ids are checked first: Keras puts another reason before what `call`
        raises here.
        """
        self._check_ids(kwargs["ids"] if "ids" in kwargs else args[0])
        return super().compute_output_spec(*args, **kwargs)

    def _check_ids(self, ids: Any) -> None:
        is_sparse = isinstance(ids, tf.SparseTensor)
        if is_sparse or ids.dtype not in (tf.int32, tf.int64):
            raise ValueError(
                f"Ids of the layer {self.name!r} must be int32 or int64, "
                f"dense or ragged; received {type(ids).__name__} of "
                f"{ids.dtype}. Give keras.Input the dtype of the ids."
            )

    def _call_dense(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        fields = self._fields_of(ids)
        if not self._combines_there:
            vectors = self._vectors(ids, fields, training)
            vectors = self._shaped(vectors, ids)
            return table_rows.combine(vectors, self.combiner)
        *batch, size = ids.shape
        if size is not None:
            self._warn_of_bytes(size)
        shape, size = tf.shape(ids)[:-1], tf.shape(ids)[-1]
        num_bags = tf.reduce_prod(shape)
        bags = tf.repeat(tf.range(num_bags), size)
        found = self._pooled(ids, fields, bags, num_bags, size, training)
        dim = 1 if self.combiner == "fm" else self.output_dim
        found = tf.reshape(found, tf.concat([shape, [dim]], axis=0))
        found.set_shape([*batch, dim])
        return found

    @property
    def _combines_there(self) -> bool:
        if not self.combine_on_servers or self._replaced:
            return False
        first, *others = (shard.value for shard in self.shards)
        # Each replica has a copy of all shards.
        is_copied = isinstance(first, tf.distribute.DistributedValues)
        return self._on_devices or bool(others and not is_copied)

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

    def _pooled(
        self,
        ids: tf.Tensor,
        fields: Any,
        bags: tf.Tensor,
        num_bags: tf.Tensor,
        sizes: tf.Tensor,
        training: bool | None,
    ) -> tf.Tensor:
        """Returns what servers reduce each bag to, `[num_bags, dim or 1]`."""
        sums = pooling.sums(
            self._sources,
            self.layout,
            self._stored(ids, fields),
            bags,
            num_bags,
            squares=self.combiner == "fm",
            differentiable=training is not False,
        )
        found = table_rows.combined(sums, sizes, str(self.combiner))
        return tf.cast(found, self.compute_dtype)

    def _shaped(self, vectors: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Gives each of the ids its vector."""
        # Not -1 anywhere: a batch may be empty.
        shape = tf.concat([tf.shape(ids), [self.output_dim]], axis=0)
        vectors = tf.reshape(vectors, shape)
        vectors.set_shape([*ids.shape, self.output_dim])
        return vectors

    def look_up_fields(
        self, ids_and_fields: Sequence[tuple[Any, int]], training: bool | None
    ) -> list[Any]:
        """Looks up ids of fields by number, all at once, without a combiner.

        Each is int32 or int64, dense or ragged, `[batch]` or `[batch, k]`.
        Returned are floats of these shapes, with `dim` behind.
        """
        self.num_lookups += 1
        given = [ids for ids, _ in ids_and_fields]
        for ids in given:
            self._check_ids(ids)
        flat = [
            ids.flat_values
            if isinstance(ids, tf.RaggedTensor)
            else tf.reshape(ids, [-1])
            for ids in given
        ]
        sizes = [tf.size(ids) for ids in flat]
        vectors = self._vectors(
            tf.concat([tf.cast(ids, tf.int64) for ids in flat], axis=0),
            tf.repeat([field for _, field in ids_and_fields], sizes),
            training,
        )
        return [
            ids.with_flat_values(part)
            if isinstance(ids, tf.RaggedTensor)
            else self._shaped(part, ids)
            for ids, part in zip(given, tf.split(vectors, sizes), strict=True)
        ]

    def _fields_of(self, ids: tf.Tensor) -> tf.Tensor | None:
        if not self._has_fields:
            return None
        axis = -1 if self.combiner in (None, "fm") else -2
        return self._ids.along(ids, axis, owner=f"layer {self.name!r}")

    def _call_ragged(
        self, ids: tf.RaggedTensor, training: bool | None
    ) -> tf.RaggedTensor | tf.Tensor:
        rank = ids.shape.rank
        if (
            self._has_fields
            or ids.flat_values.shape.rank != 1
            or (self.combiner and rank != 2)
        ):
            raise ValueError(
                f"Ragged ids of the layer {self.name!r} must be [batch, (k)] "
                f"of one field; received {ids.shape}. Create a layer for each "
                "field."
            )
        if self._combines_there:
            return self._pooled(
                ids.flat_values,
                None,
                tf.cast(ids.value_rowids(), tf.int32),
                tf.cast(ids.nrows(), tf.int32),
                ids.row_lengths()[:, tf.newaxis],
                training,
            )
        vectors = self._vectors(ids.flat_values, None, training)
        return table_rows.combine(ids.with_flat_values(vectors), self.combiner)

    def _vectors(
        self, ids: tf.Tensor, fields: Any, training: bool | None
    ) -> tf.Tensor:
        """Returns `[number of ids, dim]`."""
        rows = self._stored(ids, fields)
        return self.gathered(rows, training, dtype=self.compute_dtype)

    def _stored(self, ids: tf.Tensor, fields: Any) -> tf.Tensor:
        """Returns the row in which each id is stored, int64 `[number]`."""
        in_table = self._ids.in_table(ids, fields, owner=self._owner)
        return self.layout.storage_rows(tf.reshape(in_table, [-1]))

    def gathered(
        self,
        rows: tf.Tensor,
        training: bool | None = None,
        *,
        dtype: str | None = None,
    ) -> tf.Tensor:
        """Returns stored rows, `[n, dim]`, from wherever they are in force."""
        dtype = dtype or self.variable_dtype
        if sources.replaced.find is not None and not self._replaced:
            return tf.cast(sources.replaced.find(self, rows), dtype)
        given = self._sources
        layout = self.layout.with_shards(len(given))
        on_devices = self._on_devices and not self._replaced
        is_far = on_devices or getattr(given[0], "is_remote", False)
        if training is False and len(given) == 1 and not is_far:
            # No gradient is wanted.
            found = sources.gather(given[0], layout.as_index(rows))
            return tf.cast(found, dtype)
        return table_rows.look_up(
            given, layout, rows, dtype=dtype, on_devices=on_devices
        )

    @property
    def _replaced(self) -> Sequence[Any] | None:
        return sources.replaced.sources.get(id(self))

    @property
    def _sources(self) -> Sequence[Any]:
        return self._replaced or [shard.value for shard in self.shards]

    @property
    def _owner(self) -> str:
        # A traced inference must not depend on how the layer is called.
        kind = type(self).__name__
        return f"a {kind}" if self._replaced else f"layer {self.name!r}"

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "combiner": self.combiner,
            "combine_on_servers": self.combine_on_servers,
            "sharding": self.layout.sharding,
            "num_shards": self._num_shards,
            "oov_index": self._oov_index,
            "field_names": self._field_names,
        }

    def save_own_variables(self, store: Any) -> None:
        """Saves one array `table` in stored order, whatever the shards."""
        shards = [keras.ops.convert_to_numpy(v) for v in self.shards]
        store["table"] = np.concatenate(shards)

    def load_own_variables(self, store: Any) -> None:
        """Loads `table` shard by shard."""
        table = store["table"]
        expected = (self.layout.num_rows, self.output_dim)
        if tuple(table.shape) != expected:
            raise ValueError(
                f"The table of the layer {self.name!r} must have the shape "
                f"{expected}; received {tuple(table.shape)}. Create the layer "
                "with the arguments it had when the file was saved."
            )
        starts = self.layout.starts
        for shard, variable in enumerate(self.shards):
            variable.assign(table[starts[shard] : starts[shard + 1]])
