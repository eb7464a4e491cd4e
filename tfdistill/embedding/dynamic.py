"""DynamicEmbedding: a table whose ids get rows as they come."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import fields as field_ids
from tfdistill.embedding import layer
from tfdistill.embedding import places
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import tables


class IdColumn(keras.layers.Layer):
    """The keys of a `DynamicEmbedding`: a table `[rows, 1]` beside its own.

    Exports, versions, teachers and backups take it as they take any table.
    What is known of the keys' use goes into backups, as slots do.

    Attributes:
        table: The keys, a `Table` of whole numbers.
        columns: For each shard, what reads and changes it.
    """

    def __init__(
        self, beside: tables.Table, regions: places.Regions, rules: places.Rules
    ) -> None:
        """Makes the layer; `build` makes the keys, once there are shards."""
        super().__init__(dtype="int64", name="ids")
        self.table = tables.Table(self, beside.layout, 1, beside=beside)
        self._regions, self._rules = regions, rules
        self.columns: list[places.Column] = []

    def build(self, input_shape: object = None) -> None:
        """Makes the keys, and what is to be known of them, beside shards."""
        self.table.make()
        for shard, variable in enumerate(self.table.shards):
            own = {}
            for name in self._rules.columns:
                with self.table.place_of(shard):
                    own[name] = tf.Variable(
                        tf.zeros(variable.shape, tf.int64),
                        trainable=False,
                        name=name,
                    )
            self.table.slots.append(own)
            with tf.device(variable.value.device):
                lock = tf.CriticalSection()
            self.columns.append(
                places.Column(
                    {"keys": variable.value, **own},
                    regions=self._regions,
                    rules=self._rules,
                    first_row=self.table.layout.starts[shard],
                    lock=lock,
                )
            )
        self.built = True

    def held(self, places: tf.Tensor) -> tf.Tensor:
        """Returns what places of any shape hold, wherever that is in force."""
        found = self.table.gathered(tf.reshape(places, [-1]), training=False)
        return tf.reshape(found, tf.shape(places))

    def save_own_variables(self, store: tables.Store) -> None:
        """Saves the keys, whatever their shards."""
        self.table.save(store)

    def load_own_variables(self, store: tables.Store) -> None:
        """Loads the keys, shard by shard."""
        self.table.load(store)


@dataclasses.dataclass(frozen=True)
class _Training:
    """What trains a table, and a function of each shard; see `_finder`."""

    optimizer: keras.optimizers.Optimizer
    functions: Sequence[Any]


def _packed(
    step: tf.Tensor, unknown: tf.Tensor, *of_keys: tf.Tensor
) -> tf.Tensor:
    """Puts all that a server is asked into one message, int64."""
    bits = tf.bitcast(tf.cast(unknown, tf.float32), tf.int32)
    bits = tf.reshape(bits, [-1])
    return tf.concat(
        [tf.cast(part, tf.int64) for part in (step[None], bits, *of_keys)],
        axis=0,
    )


@keras.saving.register_keras_serializable(package="tfdistill")
class DynamicEmbedding(layer.TableLookup):
    """Looks up a vector for each id, for ids that aren't known in advance.

    An id gets its own row when it is used in training, as long as there are
    rows; no two ids ever share one, as they would by hashing. The ids of a
    field that have no row share one vector, which is trained, too, and which
    their rows begin with. The ids lie in a column beside the table and go
    wherever that goes: into files, exports, versions, backups. So a teacher
    finds an id in its own table, in whatever row it is there.

    Ids are found on the parameter servers that hold their rows, with one
    message each way, as rows of a `ShardedEmbedding` are. It takes one replica,
    or `ParameterServerStrategy`, and a `tfdistill` model around it. In
    `evaluate`, `predict` and exports no id is added.

    Attributes:
        ids: The column of keys, an `IdColumn`.
        unknown: The vectors of ids without a row, `[fields, dim]`.

    Example:
        >>> layer = DynamicEmbedding(10_000, 4, num_fields=2)
        >>> layer(tf.constant([[2**50, 0], [3, 6]])).shape.as_list()
        [2, 2, 4]
        >>> layer.rows_of([[3, 6]])
        array([[-1, -1]])
    """

    fields: field_ids.FieldKeys

    def __init__(
        self,
        num_rows: int,
        output_dim: int,
        *,
        num_fields: int | None = None,
        admit_after: int = 1,
        evict: str | None = "lru",
        max_age_steps: int | None = None,
        embeddings_initializer: tables.Initializer = "uniform",
        combiner: str | None = None,
        num_shards: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes the layer; the table follows when it is built.

        Args:
            num_rows: Number of rows, rounded up to a multiple of 1,024, or for
                more than 64 times as many, of a larger power of two. Up to
                nine tenths of them find ids.
            output_dim: Length of a vector.
            num_fields: If given, ids are `[..., fields]`, or `[..., fields, k]`
                with a combiner, and each field's ids are its own.
            admit_after: An id gets a row in the step in which it has been used
                that often. Ids that wait take places of rows, too.
            evict: Which id loses its row to a new id when all rows in which the
                new id may lie are taken: `"lru"` (default), the id used longest
                ago; `"count"`, the id used least; or None: the new id gets no
                row. Ids that wait for admission go first; ids used in the last
                64 steps stay.
            max_age_steps: If given, an id that has not been used in as many
                steps may lose its row, too, at least 64.
            embeddings_initializer: What `unknown` begins with, as in
                `keras.layers.Embedding`.
            combiner: As of `ShardedEmbedding`.
            num_shards: Defaults to the number of parameter servers, or 1.
            **kwargs: As for `keras.layers.Layer`, such as `name` and `dtype`.

        Raises:
            ValueError: An argument is out of its range.
        """
        _check_options(num_rows, num_fields, admit_after, evict, max_age_steps)
        regions = places.Regions.of(num_rows)
        super().__init__(
            field_ids.FieldKeys(num_fields),
            table_rows.RowLayout(
                regions.num_rows,
                sharding="contiguous",
                num_shards=num_shards or 1,
                unit=regions.rows_each,
            ),
            output_dim,
            embeddings_initializer=embeddings_initializer,
            combiner=combiner,
            num_shards=num_shards,
            **kwargs,
        )
        self.num_fields = num_fields
        self._regions = regions
        self._rules = places.Rules(admit_after, evict, max_age_steps)
        self._given_rows = num_rows
        self.ids = IdColumn(self.table, regions, self._rules)
        self._training: _Training | None = None
        self.table.trained_by = self._trained_by

    def build(self, input_shape: object = None) -> None:
        """Makes the shards, and beside each its keys."""
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if num_replicas > 1:
            raise ValueError(
                "A DynamicEmbedding must be trained on one replica or with "
                "tf.distribute.ParameterServerStrategy; received "
                f"{num_replicas} replicas in {self.name!r}. Use a "
                "ShardedEmbedding with hashed ids there."
            )
        self.table.make(num_shards=self._num_shards)
        self.ids.build()
        self.unknown = self.add_weight(
            shape=(self.num_fields or 1, self.output_dim),
            initializer=self.embeddings_initializer,
            autocast=False,
            name="unknown",
        )
        self.built = True

    def _trained_by(
        self,
        optimizer: keras.optimizers.Optimizer,
        slots: Sequence[Mapping[str, tf.Variable]],
        initial: Mapping[str, float],
    ) -> None:
        """Notes what trains the table: new rows begin with `initial` slots."""
        functions = [
            self._finder(shard, own, initial) for shard, own in enumerate(slots)
        ]
        self._training = _Training(optimizer, functions)

    def _finder(
        self,
        shard: int,
        slots: Mapping[str, tf.Variable],
        initial: Mapping[str, float],
    ) -> Any:
        """Returns a function of what `_packed` returned, for one shard.

        It returns which of the keys have rows, bool, and these rows, as the
        layout has them. New rows begin with their field's `unknown`, and their
        slots with `initial` values.

        Were it inlined, its loops and branches would be spread over two tasks,
        which then wait for each other at each turn.
        """
        column, table = self.ids.columns[shard], self.shards[shard].value
        shape = [len(self.fields.sizes), self.output_dim]
        end = 1 + math.prod(shape)

        def find(question: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            bits = tf.cast(question[1:end], tf.int32)
            unknown = tf.reshape(tf.bitcast(bits, tf.float32), shape)
            keys = question[end:]
            times = tf.ones_like(keys)
            if self._rules.counts:
                keys, times = tf.split(keys, 2)

            def prepare(rows: tf.Tensor, keys: tf.Tensor) -> list[Any]:
                first = tf.gather(unknown, self.fields.field_of(keys))
                values = [(table, first)]
                for name, slot in slots.items():
                    value = tf.fill(tf.shape(first), initial[name])
                    values.append((slot, value))
                return [
                    tf.raw_ops.ResourceScatterUpdate(
                        resource=variable.handle,
                        indices=rows,
                        updates=tf.cast(value, variable.dtype),
                    )
                    for variable, value in values
                ]

            has_row, rows = column.use(
                keys, times, question[0], prepare=prepare
            )
            return has_row, self.layout.as_index(rows)

        return tf.function(
            find,
            input_signature=[tf.TensorSpec([None], tf.int64)],
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def rows_of(self, ids: object) -> np.ndarray:
        """Returns the stored row of each id, int64, -1 for those without.

        `ids` are shaped as for a call.
        """
        ids = tf.convert_to_tensor(ids)
        fields = self._fields_of(ids)
        keys = self.fields.in_table(ids, fields, owner=self.table.owner)
        found, held = places.find(
            tf.reshape(keys, [-1]), self._regions, self.ids.held
        )
        return np.where(held > 0, found, -1).reshape(keys.shape)

    def _vectors(
        self, ids: tf.Tensor, fields: tf.Tensor | None, training: bool | None
    ) -> tf.Tensor:
        """Returns `[number of ids, dim]`."""
        keys = self.fields.in_table(ids, fields, owner=self.table.owner)
        distinct, positions, times = tf.unique_with_counts(
            tf.reshape(keys, [-1])
        )
        if training and self.trainable and not self.table.is_elsewhere:
            rows, own = self._used(distinct, times)
        else:
            found, held = places.find(distinct, self._regions, self.ids.held)
            has_row = tf.where(held > 0)[:, 0]
            rows = [self.table.gathered(tf.gather(found, has_row), training)]
            own = [has_row]
        return self._expanded(rows, own, distinct, positions)

    def _expanded(
        self,
        rows: Sequence[tf.Tensor],
        own: Sequence[tf.Tensor],
        keys: tf.Tensor,
        positions: tf.Tensor,
    ) -> tf.Tensor:
        """Puts rows where ids are; the tape sums the gradients of each.

        `own` says which of the distinct keys have these rows; all others have
        `unknown`, which comes behind.
        """
        who = tf.concat(own, axis=0)
        count = tf.cast(tf.size(who), tf.int64)
        index = tf.tensor_scatter_nd_update(
            self.fields.field_of(keys) + count,
            who[:, tf.newaxis],
            tf.range(count),
        )
        unknown = tf.convert_to_tensor(self.unknown)
        return table_rows.expand(
            tf.concat([*rows, unknown], axis=0),
            tf.gather(index, positions),
            self.compute_dtype,
        )

    def _used(
        self, keys: tf.Tensor, times: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Looks keys up where they lie, in a step; see `places.Column.use`.

        Returns of each shard the rows found, and which of the keys have them.
        """
        training = self._training
        if training is None:
            raise ValueError(
                "A DynamicEmbedding must be trained by a model of tfdistill, "
                "which gives the layer the step and the optimizer's slots; "
                f"{self.name!r} was called with training=True outside of such "
                "a model. Wrap the model: tfdistill.DistributedModel(model)."
            )
        step = tf.convert_to_tensor(training.optimizer.iterations)
        unknown = tf.stop_gradient(tf.convert_to_tensor(self.unknown))
        self.table.num_lookups += 1
        told = [keys, times] if self._rules.counts else [keys]
        of_shard = self.layout.partition(
            self._regions.homes(keys), tf.range(tf.size(keys)), *told
        )
        rows, own = [], []
        for shard, (_, who, *of_keys) in enumerate(of_shard):
            question = _packed(step, unknown, *of_keys)
            table = self.shards[shard].value
            with self.table.device_of(shard):
                has_row, place = training.functions[shard](question)
                rows.append(tf.gather(table, place))
            own.append(tf.boolean_mask(who, has_row))
        return rows, own

    def save_own_variables(self, store: tables.Store) -> None:
        """Saves `unknown` besides the table; the ids save themselves."""
        super().save_own_variables(store)
        store["unknown"] = keras.ops.convert_to_numpy(self.unknown)

    def load_own_variables(self, store: tables.Store) -> None:
        """Loads both."""
        super().load_own_variables(store)
        self.unknown.assign(store["unknown"])

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            **super().get_config(),
            "num_rows": self._given_rows,
            "num_fields": self.num_fields,
            "admit_after": self._rules.admit_after,
            "evict": self._rules.evict,
            "max_age_steps": self._rules.max_age_steps,
        }


def _check_options(
    num_rows: int,
    num_fields: int | None,
    admit_after: int,
    evict: str | None,
    max_age_steps: int | None,
) -> None:
    for name, value, least in (
        ("num_rows", num_rows, 1),
        ("num_fields", num_fields, 1),
        ("admit_after", admit_after, 1),
        ("max_age_steps", max_age_steps, places.STEPS_KEPT),
    ):
        if value is None and name in ("num_fields", "max_age_steps"):
            continue
        if not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(
                f"`{name}` must be a whole number >= {least}; received "
                f"{value!r}."
            )
    if evict not in places.EVICTIONS:
        raise ValueError(
            f"`evict` must be one of {places.EVICTIONS}; received {evict!r}. "
            "None leaves ids without a row once all are taken."
        )
