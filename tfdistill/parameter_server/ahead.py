"""Rows fetched ahead: later batches' rows travel while a step computes.

A step on servers waits for the rows of its batch and for the dense variables
(ScaleFreeCTR hides the same wait: Guo et al., arXiv:2104.08542). Here they are
requested before the steps ahead of it have been computed, together with the
optimizer's slots. Whatever these steps change is also changed in the worker's
copies, by the same operations as on the servers. So one worker trains exactly
as if it had waited; it sees other workers' changes that many steps later.
"""

import collections
import dataclasses
import functools
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import sources
from tfdistill.embedding import tables
from tfdistill.parameter_server import variables as remote_variables

Find = Callable[[tf.Tensor], tf.Tensor]


class _Scratch:
    """A value that operations change as they change a variable."""

    device = ""

    def __init__(self, value: tf.Tensor) -> None:
        """Makes the resource, which `end` removes again."""
        self.dtype, self.shape = value.dtype, value.shape
        self.handle = tf.raw_ops.VarHandleOp(
            dtype=self.dtype,
            shape=self.shape,
            shared_name=f"tfdistill_ahead_{uuid.uuid4().hex}",
        )
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def end(self) -> tf.Tensor:
        """Returns the value as it is by now."""
        value = tf.raw_ops.ReadVariableOp(
            resource=self.handle, dtype=self.dtype
        )
        value.set_shape(self.shape)
        with tf.control_dependencies([value]):
            tf.raw_ops.DestroyResourceOp(resource=self.handle)
        return value


def _changed(
    value: tf.Tensor,
    slots: Mapping[str, tf.Tensor],
    change: Callable[[Any, Mapping[str, Any]], None],
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns copies as `change` would leave a variable and its slots."""
    variable = _Scratch(value)
    scratch = {name: _Scratch(slot) for name, slot in slots.items()}
    change(variable, scratch)
    return variable.end(), {name: slot.end() for name, slot in scratch.items()}


@dataclasses.dataclass
class Part:
    """Rows of one shard that a batch looks up, as they are by now.

    Attributes:
        shard: The shard's variable.
        rows: Local rows of that shard, integers `[n]`, all different.
        value: Floats `[n, dim]`.
        slots: What the optimizer keeps of these, as `value`, by name.
    """

    shard: tf.Variable
    rows: tf.Tensor
    value: tf.Tensor
    slots: Mapping[str, tf.Tensor]

    def update(
        self,
        rule: rules.UpdateRule,
        changed: tf.IndexedSlices,
        hyper: rules.Hyperparameters,
    ) -> None:
        """Changes those rows that an update of the shard changes."""
        # Rows of one list are different, so this finds them in the other.
        _, places = tf.unique(tf.concat([self.rows, changed.indices], axis=0))
        places = places[tf.size(self.rows) :]
        common = tf.where(places < tf.size(self.rows))[:, 0]
        rows = tf.gather(places, common)
        grads = tf.gather(changed.values, common)
        self.value, self.slots = _changed(
            self.value,
            self.slots,
            functools.partial(
                rule.apply_rows, rows=rows, grads=grads, hyper=hyper
            ),
        )


@dataclasses.dataclass
class _Fetched:
    """What a step of one batch reads."""

    dense: list[tf.Tensor]
    others: list[tf.Tensor]
    scalars: list[tf.Tensor]
    # By table, in the order of its lookups.
    lookups: dict[tables.Table, list[tuple[table_rows.Lookup, list[Part]]]]

    @property
    def parts(self) -> list[Part]:
        return [
            part
            for lookups in self.lookups.values()
            for _, parts in lookups
            for part in parts
        ]


class RowsAhead:
    """Fetches what the steps of one execution read, some batches ahead."""

    def __init__(
        self,
        model: keras.Model,
        variables: remote_variables.RemoteVariables,
        *,
        rule: rules.UpdateRule,
        dense_slots: Sequence[rules.Slots],
        shard_slots: Mapping[int, rules.Slots],
        num_ahead: int,
    ) -> None:
        """Fetches nothing yet.

        `dense_slots` are in the order of the variables, `shard_slots` by the id
        of each shard's variable that is trained.
        """
        for table in variables.tables:
            if table.is_by_id:
                raise ValueError(
                    "`rows_ahead` must be 0 with a DynamicEmbedding, whose ids "
                    "find their rows on the servers; received "
                    f"{num_ahead} with the {table.owner}. Leave it out."
                )
            if table.combines_there:
                raise ValueError(
                    "`rows_ahead` must be 0 with `combine_on_servers`, which "
                    f"sends no rows; received {num_ahead} with the "
                    f"{table.owner}. Leave one of them out."
                )
        self._model = model
        self._variables = variables
        self._rule = rule
        self._dense_slots = dense_slots
        self._shard_slots = shard_slots
        self._num_ahead = num_ahead
        self._packed_slots = remote_variables.PackedVariables(
            [slot for own in dense_slots for slot in own.values()]
        )
        self._looked_up: list[tables.Table] = []
        self._wanted = tf.function(self._rows_of, autograph=False)
        # While an execution is traced: batches to come, what is fetched of the
        # next ones, and of the one at hand.
        self._batches: collections.deque[Any] = collections.deque()
        self._pending: collections.deque[_Fetched] = collections.deque()
        self._current: _Fetched | None = None
        # Slots of the dense variables by now. They are read once an execution.
        self._slots: list[dict[str, tf.Tensor]] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """Begins an execution of a step for each batch."""
        self._batches = collections.deque(batches)
        self._pending.clear()
        values = iter(self._packed_slots.read())
        self._slots = [
            {name: next(values) for name in own} for own in self._dense_slots
        ]

    def next(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Begins a step; returns what `RemoteVariables.read` does."""
        while self._batches and len(self._pending) <= self._num_ahead:
            self._pending.append(self._fetch(self._batches.popleft()))
        self._current = found = self._pending.popleft()
        return [*found.dense, *found.others], found.scalars

    @property
    def parts(self) -> list[Part]:
        """The rows that the step looks up."""
        return [] if self._current is None else self._current.parts

    def lookups(self) -> dict[tables.Table, Find]:
        """Returns what finds the rows that were fetched for the step."""
        fetched = self._current.lookups if self._current else {}
        left = {table: iter(lookups) for table, lookups in fetched.items()}

        def find(table: tables.Table, rows: tf.Tensor) -> tf.Tensor:
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

    def _by_table(self, find: Callable[..., tf.Tensor]) -> dict[Any, Find]:
        return {
            table: functools.partial(find, table)
            for table in self._variables.tables
        }

    def updated(
        self,
        dense: Sequence[Any],
        shards: Mapping[int, tf.IndexedSlices | None],
        hyper: rules.Hyperparameters,
    ) -> None:
        """Applies a step's gradients to what is pending, as the servers do.

        `shards` has the gradients of shards, by the id of the variable.
        """
        for index, gradient in enumerate(dense):
            if gradient is None:
                continue
            before = self._slots[index]
            for fetched in self._pending:
                fetched.dense[index], self._slots[index] = _changed(
                    fetched.dense[index],
                    before,
                    functools.partial(
                        self._rule.apply_dense, grad=gradient, hyper=hyper
                    ),
                )
        for fetched in self._pending:
            for part in fetched.parts:
                changed = shards.get(id(part.shard))
                if changed is not None:
                    part.update(self._rule, changed, hyper)

    def assigned(self, values: Sequence[tf.Tensor | None]) -> None:
        """Changes what is pending of dense variables that a step assigned."""
        for fetched in self._pending:
            count = len(fetched.dense)
            found = [
                old if new is None else new
                for new, old in zip(
                    values, [*fetched.dense, *fetched.others], strict=True
                )
            ]
            fetched.dense, fetched.others = found[:count], found[count:]

    def _fetch(self, batch: object) -> _Fetched:
        values, scalars = self._variables.read()
        count = len(self._variables.trainable)
        lookups: dict[tables.Table, Any] = {}
        wanted = self._wanted(batch)
        for table, rows in zip(self._looked_up, wanted, strict=True):
            lookup = table_rows.Lookup.of(table.layout, rows)
            parts = [
                self._part(shard.value, own)
                for shard, own in zip(table.shards, lookup.rows, strict=True)
            ]
            lookups.setdefault(table, []).append((lookup, parts))
        return _Fetched(values[:count], values[count:], scalars, lookups)

    def _part(self, shard: tf.Variable, rows: tf.Tensor) -> Part:
        """Fetches rows, and their slots, in one message."""
        slots = self._shard_slots.get(id(shard), {})
        with tf.device(shard.device):
            sources = [shard, *slots.values()]
            packed = tf.concat([tf.gather(v, rows) for v in sources], axis=1)
        value, *others = tf.split(tf.identity(packed), len(sources), axis=1)
        return Part(shard, rows, value, dict(zip(slots, others, strict=True)))

    def _rows_of(self, batch: Any) -> list[tf.Tensor]:
        """Returns the stored rows of each lookup of a call of the model.

        Nothing else of the call is computed: its lookups give zeros.
        """
        x, *_ = keras.utils.unpack_x_y_sample_weight(self._model.bare(batch))
        found: list[tuple[Any, tf.Tensor]] = []
        dense = [*self._variables.trainable, *self._variables.others]
        zeros = [tf.zeros(each.shape, each.dtype) for each in dense]
        mapping = list(zip(dense, zeros, strict=True))

        def find(table: tables.Table, rows: tf.Tensor) -> tf.Tensor:
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
    table: tables.Table, rows: tf.Tensor, zeros: Sequence[tf.Tensor]
) -> None:
    """Checks that rows are not computed from what a step changes."""
    changing, seen = {value.op for value in zeros}, set()
    stack = [rows.op]
    while stack:
        operation = stack.pop()
        if operation in changing:
            raise ValueError(
                "`rows_ahead` must be 0 if ids depend on trained variables, as "
                f"the ids of the layer {table.layer.name!r} do. Leave it out."
            )
        if operation not in seen:
            seen.add(operation)
            stack.extend(value.op for value in operation.inputs)
