"""Rows fetched ahead: later batches' rows travel while a step computes.

A step on servers waits for the rows of its batch and for the dense variables
(ScaleFreeCTR hides the same wait: Guo et al., arXiv:2104.08542). Here they are
requested before the steps ahead of it have been computed, together with the
optimizer's slots. Whatever these steps change is also changed in the worker's
copies, by the same rule as on the servers. So one worker trains exactly as if
it had waited; it sees other workers' changes that many steps later.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import sources
from tfdistill.parameter_server import fetching
from tfdistill.parameter_server import variables as remote_variables


@keras.saving.register_keras_serializable(package="tfdistill.contrib")
class RowsAhead:
    """Fetches what a step on parameter servers reads some batches ahead.

    For slow links, in `compile(rows_ahead=RowsAhead(2))`. The results of one
    worker stay the same; with several, each sees the others' updates that many
    steps later. It needs data that repeat and several steps per execution,
    starts again with each execution, and fetches the optimizer's slots, too.

    Attributes:
        num_batches: How many batches ahead.

    Example:
        >>> RowsAhead(2).num_batches
        2
    """

    def __init__(self, num_batches: int = 2) -> None:
        """Takes the number of batches.

        Args:
            num_batches: How many batches ahead of its step a worker fetches
                rows and variables: 1 or 2 is enough. Default 2.

        Raises:
            ValueError: The number is less than 1.
        """
        if num_batches < 1:
            raise ValueError(
                f"`num_batches` must be >= 1; received {num_batches}. Leave "
                "`rows_ahead` out to fetch nothing ahead."
            )
        self.num_batches = num_batches

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"num_batches": self.num_batches}

    def fetching(
        self, model: keras.Model, update: Any, *, endless: bool
    ) -> fetching.Fetching:
        """Returns what reads for a model's steps; `fit` calls it.

        Args:
            model: The model that trains on servers.
            update: Its `RemoteUpdate`.
            endless: Whether the data repeat forever.

        Raises:
            ValueError: The data end, or a table's rows cannot be known ahead.
        """
        if not endless:
            raise ValueError(
                "`rows_ahead` must be left out for data that end, since there "
                f"may be no next batch; received {self.num_batches}. Repeat "
                "the data, and pass `steps_per_epoch`."
            )
        return _Ahead(model, update, self.num_batches)


@dataclasses.dataclass
class _Part(fetching.Part):
    """Rows of a shard, with what the optimizer keeps of them, in its order."""

    slots: Sequence[tf.Tensor] = ()

    def update(
        self,
        rule: Any,
        changed: tf.IndexedSlices,
        hyper: Mapping[str, tf.Tensor],
    ) -> None:
        """Changes those rows that an update of the shard changes."""
        # Rows of one list are different, so this finds them in the other.
        _, places = tf.unique(tf.concat([self.rows, changed.indices], axis=0))
        places = places[tf.size(self.rows) :]
        common = tf.where(places < tf.size(self.rows))[:, 0]
        places = tf.gather(places, common)
        before = [self.value, *self.slots]
        after = rule.changed(
            self.shard,
            [tf.gather(values, places) for values in before],
            tf.gather(changed.values, common),
            hyper,
        )
        self.value, *self.slots = (
            tf.tensor_scatter_nd_update(old, places[:, tf.newaxis], new)
            for old, new in zip(before, after, strict=True)
        )


@dataclasses.dataclass
class _Fetched:
    """What a step of one batch reads."""

    dense: list[tf.Tensor]
    others: list[tf.Tensor]
    scalars: list[tf.Tensor]
    # By table, in the order of its lookups.
    lookups: dict[Any, list[tuple[table_rows.Lookup, list[_Part]]]]

    @property
    def parts(self) -> list[_Part]:
        return [
            part
            for lookups in self.lookups.values()
            for _, parts in lookups
            for part in parts
        ]


class _Ahead(fetching.Fetching):
    """Fetches what the steps of one execution read, some batches ahead."""

    def __init__(self, model: keras.Model, update: Any, num_ahead: int) -> None:
        """Fetches nothing yet."""
        super().__init__(update.fetching.variables)
        for table in self.variables.tables:
            if table.is_by_id:
                raise ValueError(
                    "`rows_ahead` must be left out with a DynamicEmbedding, "
                    "whose ids find their rows on the servers; received "
                    f"{num_ahead} with the {table.owner}."
                )
            if table.combines_there:
                raise ValueError(
                    "`rows_ahead` must be left out with `combine_on_servers`, "
                    f"which sends no rows; received {num_ahead} with the "
                    f"{table.owner}. Leave one of them out."
                )
        self._model = model
        self._update = update
        self._num_ahead = num_ahead
        self._shard_slots = {
            id(shard.value): list(shard.slots.values())
            for shard in update.moving
        }
        self._packed_slots = remote_variables.PackedVariables(
            [slot for own in update.dense_slots for slot in own.values()]
        )
        self._looked_up: list[Any] = []
        self._wanted = tf.function(self._rows_of, autograph=False)
        # While an execution is traced: batches to come, what is fetched of the
        # next ones, and of the one at hand.
        self._batches: collections.deque[Any] = collections.deque()
        self._pending: collections.deque[_Fetched] = collections.deque()
        self._current: _Fetched | None = None
        # Slots of the dense variables by now. They are read once an execution.
        self._slots: list[list[tf.Tensor]] = []

    def begin_fetch(self, batches: Sequence[Any]) -> None:
        """Begins an execution of a step for each batch."""
        self._batches = collections.deque(batches)
        self._pending.clear()
        values = iter(self._packed_slots.read())
        self._slots = [
            [next(values) for _ in own] for own in self._update.dense_slots
        ]

    def next(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Begins a step; returns what `RemoteVariables.read` does."""
        while self._batches and len(self._pending) <= self._num_ahead:
            self._pending.append(self._fetch(self._batches.popleft()))
        self._current = found = self._pending.popleft()
        return [*found.dense, *found.others], found.scalars

    @property
    def parts(self) -> Sequence[_Part]:
        """The rows that the step looks up."""
        return [] if self._current is None else self._current.parts

    def lookups(self) -> Mapping[Any, fetching.Find]:
        """Returns what finds the rows that were fetched for the step."""
        fetched = self._current.lookups if self._current else {}
        left = {table: iter(lookups) for table, lookups in fetched.items()}

        def find(table: Any, rows: tf.Tensor) -> tf.Tensor:
            del rows  # The rows that were requested ahead.
            lookup, parts = next(left.get(table, iter(())), (None, ()))
            if lookup is None:
                raise ValueError(
                    "With `rows_ahead`, a step must make the same lookups as a "
                    "call of the model; this step looks up "
                    f"{table.layer.name!r} again. Leave `rows_ahead` out."
                )
            found = [part.value for part in parts]
            return lookup.vectors(found, table.dtype)

        return self._by_table(find)

    def _by_table(
        self, find: Callable[[Any, tf.Tensor], tf.Tensor]
    ) -> dict[Any, fetching.Find]:
        return {
            table: functools.partial(find, table)
            for table in self.variables.tables
        }

    def updated(
        self,
        dense: Sequence[Any],
        shards: Mapping[int, tf.IndexedSlices | None],
        hyper: Mapping[str, tf.Tensor],
    ) -> None:
        """Applies a step's gradients to what is pending, as the servers do."""
        update = self._update
        for index, gradient in enumerate(dense):
            if gradient is None:
                continue
            # All that is pending has the values that the servers have by now;
            # each changes alike, which costs an update for each.
            slots = self._slots[index]
            for fetched in self._pending:
                before = [fetched.dense[index], *slots]
                added = update.rule.added(
                    update.dense[index], before, gradient, hyper
                )
                fetched.dense[index], *self._slots[index] = (
                    old + more for old, more in zip(before, added, strict=True)
                )
        for fetched in self._pending:
            for part in fetched.parts:
                changed = shards.get(id(part.shard))
                if changed is not None:
                    part.update(update.rule, changed, hyper)

    def assigned(self, values: Sequence[tf.Tensor | None]) -> None:
        """Changes what is pending of dense variables that a step assigned."""
        for fetched in self._pending:
            found = [*fetched.dense, *fetched.others]
            for index, value in enumerate(values):
                if value is not None:
                    found[index] = value
            count = len(fetched.dense)
            fetched.dense, fetched.others = found[:count], found[count:]

    def _fetch(self, batch: object) -> _Fetched:
        values, scalars = self.variables.read()
        count = len(self.variables.trainable)
        lookups: dict[Any, Any] = {}
        wanted = self._wanted(batch)
        for table, rows in zip(self._looked_up, wanted, strict=True):
            lookup = table_rows.Lookup.of(table.layout, rows)
            parts = [
                self._part(shard.value, own)
                for shard, own in zip(table.shards, lookup.rows, strict=True)
            ]
            lookups.setdefault(table, []).append((lookup, parts))
        return _Fetched(values[:count], values[count:], scalars, lookups)

    def _part(self, shard: tf.Variable, rows: tf.Tensor) -> _Part:
        """Fetches rows, and their slots, in one message."""
        kept = [shard, *self._shard_slots.get(id(shard), ())]
        with tf.device(shard.device):
            packed = tf.concat([tf.gather(v, rows) for v in kept], axis=1)
        value, *slots = tf.split(tf.identity(packed), len(kept), axis=1)
        return _Part(shard, rows, value, slots)

    def _rows_of(self, batch: Any) -> list[tf.Tensor]:
        """Returns the stored rows of each lookup of a call of the model.

        Nothing else of the call is computed: its lookups give zeros.
        """
        x, *_ = keras.utils.unpack_x_y_sample_weight(self._model.bare(batch))
        found: list[tuple[Any, tf.Tensor]] = []
        dense = [*self.variables.trainable, *self.variables.others]
        zeros = [tf.zeros(each.shape, each.dtype) for each in dense]
        mapping = list(zip(dense, zeros, strict=True))

        def find(table: Any, rows: tf.Tensor) -> tf.Tensor:
            found.append((table, rows))
            shape = [tf.size(rows), table.dim]
            zeros.append(tf.zeros(shape, table.dtype))
            return zeros[-1]

        with (
            keras.StatelessScope(mapping, collect_losses=True),
            sources.rows_from(self._by_table(find)),
        ):
            self._model(x, training=self._model.in_training)
        self._looked_up = [table for table, _ in found]
        for table, rows in found:
            _check_follows_from_data(table, rows, zeros)
        return [rows for _, rows in found]


def _check_follows_from_data(
    table: Any, rows: tf.Tensor, zeros: Sequence[tf.Tensor]
) -> None:
    """Checks that rows are not computed from what a step changes."""
    changing, seen = {value.op for value in zeros}, set()
    stack = [rows.op]
    while stack:
        operation = stack.pop()
        if operation in changing:
            raise ValueError(
                "`rows_ahead` must be left out if ids depend on trained "
                f"variables, as the ids of the layer {table.layer.name!r} do."
            )
        if operation not in seen:
            seen.add(operation)
            stack.extend(value.op for value in operation.inputs)
