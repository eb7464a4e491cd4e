"""Training updates: tables by their touched rows, the rest by Keras.

Keras' optimizers update an `IndexedSlices` gradient at a cost that grows with
the table. Here the gradients of `ShardedEmbedding` are summed per id over all
replicas, clipped together with the others, and applied to the rows of each
shard on each replica. All other variables are left to Keras.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import tables


class TableUpdates:
    """Updates the trainable tables of one compiled and built model.

    Attributes:
        shards: All shards of tables that change, with their slots.
    """

    @classmethod
    def of(cls, model: keras.Model) -> "TableUpdates | None":
        """Returns what updates a model's tables; None if it has none."""
        if not tables.tables_of(model):
            return None
        with tf.init_scope():  # A step may be being traced.
            return cls(model)

    def __init__(self, model: keras.Model) -> None:
        """Makes the slots, each beside its shard."""
        self.optimizer = model.optimizer
        self._rule = rules.UpdateRule(model.optimizer)
        changing = [
            table
            for table in tables.tables_of(model)
            if table.layer.trainable or not table.is_trained
        ]
        self.shards = make_shards(
            self._rule, model.optimizer, changing, model.distribute_strategy
        )

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates all variables once, and the step counter.

        `gradients` are summed over the replicas, None for a Keras variable
        that has none.
        """
        by_shard = {id(shard.variable): shard.table for shard in self.shards}
        owners = [by_shard.get(id(variable)) for variable in variables]
        distinct = [
            _distinct(gradient, owner)
            for gradient, owner in zip(gradients, owners, strict=True)
        ]
        clipped = rules.clip(self.optimizer, distinct, owners)
        hyper = self._rule.hyperparameters(
            tf.convert_to_tensor(self.optimizer.iterations)
        )
        by_variable = {
            id(v): g for v, g in zip(variables, clipped, strict=True)
        }
        self._update_tables(by_variable, hyper)
        rest = [
            (by_variable[id(variable)], variable)
            for variable, owner in zip(variables, owners, strict=True)
            if owner is None
        ]
        if any(gradient is not None for gradient, _ in rest):
            self.optimizer.apply(*zip(*rest, strict=True))
        else:
            self.optimizer.iterations.assign_add(1)

    def _update_tables(
        self, gradients: dict[int, Any], hyper: rules.Hyperparameters
    ) -> None:
        moved = [
            (shard, gradients[id(shard.variable)])
            for shard in self.shards
            if gradients.get(id(shard.variable)) is not None
        ]
        if not replicas.in_replica():
            for shard, rows in moved:
                self._rule.apply_rows(
                    shard.value, shard.slots, rows.indices, rows.values, hyper
                )
            return

        def update_copies(
            strategy: tf.distribute.Strategy,
            slices: Sequence[tuple[tf.Tensor, tf.Tensor]],
            hyper: rules.Hyperparameters,
        ) -> None:
            for (shard, _), (rows, values) in zip(moved, slices, strict=True):
                strategy.extended.update(
                    shard.value,
                    self._rule.apply_rows,
                    args=(shard.slots, rows, values, hyper),
                    group=False,
                )

        slices = [(rows.indices, rows.values) for _, rows in moved]
        tf.distribute.get_replica_context().merge_call(
            update_copies, args=(slices, hyper)
        )


def make_shards(
    rule: rules.UpdateRule,
    optimizer: keras.optimizers.Optimizer,
    changing: Sequence[tables.Table],
    strategy: tf.distribute.Strategy,
) -> list[tables.Shard]:
    """Makes what an optimizer keeps of tables, each slot beside its shard.

    Returns all their shards; a table that none trains has its slots already.
    """
    found = []
    for table in changing:
        slots: Sequence[tables.Slots] = table.slots
        if table.is_trained:
            slots = [rule.make_slots(s.value, strategy) for s in table.shards]
        if table.trained_by is not None:
            table.trained_by(optimizer, slots, rule.slots)
        found += [
            tables.Shard(table, variable, own)
            for variable, own in zip(table.shards, slots, strict=True)
        ]
    return found


def _distinct(
    gradient: tf.Tensor | tf.IndexedSlices | None, table: tables.Table | None
) -> Any:
    """Makes each row come once: sums over replicas and lookups repeat it."""
    if isinstance(gradient, tf.IndexedSlices):
        return table_rows.sum_per_row(gradient)
    if gradient is not None and table is not None:
        raise ValueError(
            f"The table of the layer {table.layer.name!r} must be used only by "
            "lookups; received a gradient for all its rows. Call the layer, "
            "outside of loops, instead of using its variables."
        )
    return gradient


def dense_variables(model: keras.Model) -> list[Any]:
    """Returns the trainable variables that are left to Keras' optimizer."""
    of_tables = {
        id(shard) for table in tables.tables_of(model) for shard in table.shards
    }
    return [v for v in model.trainable_variables if id(v) not in of_tables]
