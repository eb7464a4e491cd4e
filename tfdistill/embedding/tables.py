"""A table: shards and their layout; all that reads or writes rows starts here.

A layer with a table has it as an attribute, whether it looks ids up there or
keeps keys. Graphs, files and backups see a table as one variable.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Any
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import sources
from tfdistill.embedding import values as initial
from tfdistill.system import keras_internals

# The order of a table whose rows lie where their ids were put.
BY_ID = "by_id"
# What a layer saves its arrays to, and loads them from.
Store = MutableMapping[str, Any]
Initializer: TypeAlias = (
    str | Mapping[str, Any] | keras.initializers.Initializer
)
Slots = Mapping[str, tf.Variable]


class Table:
    """A layer's weights `[rows, dim]` in shards, in stored order.

    Attributes:
        layer: The layer that has the weights.
        layout: Where each row lies, a `RowLayout`.
        sizes: The number of ids of each field; by default, of one.
        dim: Length of a row.
        combines_there: Whether servers reduce bags of rows, if there are some.
        shards: Keras variables `[rows, dim]`, once `make` has made them.
        slots: For each shard of a table beside another, by name: what is known
            of its rows, and goes into backups as an optimizer's slots do.
        trained_by: A function that gets the optimizer of a training, the slots
            of each shard, and what these begin with; or None.
        num_lookups: How often rows were looked up, traces included.
    """

    def __init__(
        self,
        layer: keras.Layer,
        layout: table_rows.RowLayout,
        dim: int,
        *,
        combines_there: bool = False,
        beside: "Table | None" = None,
    ) -> None:
        """Makes no shard yet.

        A table `beside` another has as many shards, each on the device of the
        other's, and no optimizer trains it.
        """
        self.layer, self.layout, self.dim = layer, layout, dim
        self.sizes = [layout.num_rows]
        self.combines_there = combines_there
        self.shards: list[Any] = []
        self.slots: list[Slots] = []
        self.trained_by: Callable[..., None] | None = None
        self.num_lookups = 0
        self._beside = beside
        self._on_servers = False

    # ---- shards ----

    def make(
        self,
        initializer: Initializer = "zeros",
        *,
        num_shards: int | None = None,
    ) -> None:
        """Makes the shards and fills them, each where it lives.

        `num_shards` defaults to the number of parameter servers, or 1. Call it
        where the layer builds its weights.
        """
        initializer = keras.initializers.get(initializer)
        jobs = keras_internals.jobs_of(tf.distribute.get_strategy())
        num_servers = len(jobs.get("ps", ()))
        self._on_servers = num_servers > 0
        if self._beside is not None:
            num_shards = len(self._beside.shards)
        self.layout = self.layout.with_shards(
            num_shards or min(max(num_servers, 1), self.layout.most_shards)
        )
        values = initial.TableValues(initializer, self.layout, self.dim)
        zeros = isinstance(initializer, keras.initializers.Zeros)
        # No server holds its shard twice, not even at first. In a trace, a
        # variable gets its values only when that has ended.
        in_place = self._on_servers and tf.executing_eagerly() and not zeros
        for shard, num_rows in enumerate(self.layout.shard_sizes):
            with self.place_of(shard):
                variable = self.layer.add_weight(
                    shape=(num_rows, self.dim),
                    initializer="zeros"
                    if in_place or zeros
                    else functools.partial(values.of_shard, shard),
                    trainable=self.is_trained,
                    autocast=False,
                    name=f"table_{shard}"
                    if self.layout.num_shards > 1
                    else "table",
                )
            if in_place:
                values.fill(shard, variable.value)
            self.shards.append(variable)

    def place_of(self, shard: int) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which what lies beside a shard is made."""
        if self._beside is None:
            return contextlib.nullcontext()
        strategy = tf.distribute.get_strategy()
        neighbour = self._beside.shards[shard].value
        return strategy.extended.colocate_vars_with(neighbour)

    def device_of(self, shard: int) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope of the server that holds a shard, if one does."""
        if not self._on_servers:
            return contextlib.nullcontext()
        return tf.device(self.shards[shard].value.device)

    @property
    def is_trained(self) -> bool:
        """Whether its values are what training is for."""
        return self._beside is None

    @property
    def is_by_id(self) -> bool:
        """Whether rows lie where their ids were put, as these came."""
        return self.layout.unit > 1

    @property
    def is_on_servers(self) -> bool:
        """Whether the shards lie on parameter servers."""
        return any("/job:ps" in shard.value.device for shard in self.shards)

    # ---- as one variable ----

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of all shards together."""
        return tf.TensorShape([self.layout.num_rows, self.dim])

    @property
    def dtype(self) -> str:
        """The dtype of the shards."""
        return self.layer.variable_dtype

    @property
    def path(self) -> str:
        """The name of the table in its model."""
        return f"{self.layer.path}/table"

    @property
    def value(self) -> tf.Tensor:
        """The whole table, on the caller's device."""
        shards = [tf.convert_to_tensor(shard.value) for shard in self.shards]
        return shards[0] if len(shards) == 1 else tf.concat(shards, axis=0)

    @property
    def order(self) -> dict[str, Any]:
        """What the stored order of the ids follows from, as JSON."""
        return {
            "name": self.path,
            "sizes": self.sizes,
            "sharding": BY_ID if self.is_by_id else self.layout.sharding,
        }

    def save(self, store: Store) -> None:
        """Saves one array `table` in stored order, whatever the shards."""
        shards = [keras.ops.convert_to_numpy(v) for v in self.shards]
        store["table"] = np.concatenate(shards)

    def load(self, store: Store) -> None:
        """Loads what `save` saved, shard by shard."""
        table, expected = store["table"], tuple(self.shape)
        if tuple(table.shape) != expected:
            raise ValueError(
                f"The table of the layer {self.layer.name!r} must have the "
                f"shape {expected}; received {tuple(table.shape)}. Create the "
                "layer with the arguments it had when the file was saved."
            )
        starts = self.layout.starts
        for shard, variable in enumerate(self.shards):
            variable.assign(table[starts[shard] : starts[shard + 1]])

    # ---- lookups ----

    @property
    def is_elsewhere(self) -> bool:
        """Whether lookups here read other rows than the shards hold."""
        given = sources.given(self)
        return given is not None and not callable(given)

    @property
    def owner(self) -> str:
        """What errors call the layer."""
        # A traced inference must not depend on how the layer is called.
        kind = type(self.layer).__name__
        return (
            f"a {kind}" if self.is_elsewhere else f"layer {self.layer.name!r}"
        )

    def stored(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of ids in [0, num_rows), int64 `[number of ids]`."""
        return self.layout.storage_rows(tf.reshape(ids, [-1]))

    def gathered(
        self,
        rows: tf.Tensor,
        training: bool | None,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        """Returns stored rows, int64 `[n]`, from wherever they are in force.

        `[n, dim]` of the `dtype`, by default the table's. Only if `training` is
        False, there is no work that the gradient needs.
        """
        self.num_lookups += 1
        dtype = dtype or self.dtype
        found = sources.given(self) or [
            sources.OnServer(shard.value) if self._on_servers else shard.value
            for shard in self.shards
        ]
        if callable(found):
            return tf.cast(found(rows), dtype)
        layout = self.layout.with_shards(len(found))
        first = found[0]
        is_remote = isinstance(first, sources.OwnRows) and first.is_remote
        if training is False and len(found) == 1 and not is_remote:
            values = sources.gather(first, layout.as_index(rows))
            return tf.cast(values, dtype)
        return table_rows.look_up(found, layout, rows, dtype=dtype)

    @property
    def sums_travel(self) -> bool:
        """Whether lookups here get sums of bags, made where the rows are."""
        if not self.combines_there or self.is_elsewhere:
            return False
        first, *others = (shard.value for shard in self.shards)
        # Each replica has a copy of all shards.
        is_copied = isinstance(first, tf.distribute.DistributedValues)
        return self._on_servers or bool(others and not is_copied)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard of a table, with what is kept beside it, by name."""

    table: Table
    variable: Any
    slots: Slots

    @property
    def value(self) -> tf.Variable:
        """What operations change."""
        return self.variable.value


def tables_of(model: keras.Layer) -> list[Table]:
    """Returns all tables of a model, of nested layers too, each once.

    In the order in which Keras finds their layers.
    """
    found = {
        id(value): value
        for layer in keras_internals.all_layers(model)
        for value in vars(layer).values()
        if isinstance(value, Table)
    }
    return list(found.values())


def variables_of(model: keras.Model) -> list[Any]:
    """Returns a built model's variables, one for each table.

    A `Table` stands in the place of its first shard.
    """
    by_shard = {
        id(shard): table for table in tables_of(model) for shard in table.shards
    }
    found: list[Any] = []
    for variable in model.variables:
        table = by_shard.get(id(variable))
        if table is None:
            found.append(variable)
        elif variable is table.shards[0]:
            found.append(table)
    return found


def parts_of(variable: Table | keras.Variable) -> list[Any]:
    """Returns the Keras variables of one of a graph: a table has shards."""
    return variable.shards if isinstance(variable, Table) else [variable]


def by_part(
    variable: Table | keras.Variable, value: tf.Tensor
) -> list[tuple[Any, tf.Tensor]]:
    """Returns the Keras variables of one of a graph, each with its rows."""
    parts = parts_of(variable)
    if len(parts) == 1:
        return [(parts[0], value)]
    rows = tf.split(value, [int(part.shape[0]) for part in parts])
    return list(zip(parts, rows, strict=True))


def assign(
    variable: Table | keras.Variable,
    value: tf.Tensor,
    strategy: tf.distribute.Strategy,
) -> None:
    """Gives one of a graph's variables a value, on all of this task's replicas.

    A table's value has all of its rows.
    """
    for part, rows in by_part(variable, value):
        for copy in strategy.experimental_local_results(part.value):
            copy.assign(rows)
