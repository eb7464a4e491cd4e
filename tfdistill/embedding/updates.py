"""Training updates: tables by their touched rows, the rest by Keras.

Keras' optimizers update an `IndexedSlices` gradient at a cost that grows with
the table. Here the gradients of `ShardedEmbedding` are summed per id over all
replicas, clipped together with the others, and applied by one fused operation
for each shard on each replica. All other variables are left to Keras.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import dynamic
from tfdistill.embedding import layer as embedding_layer
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import tables

TableSlots = list[
    tuple[embedding_layer.ShardedEmbedding, int, Mapping[str, Any]]
]


class TableUpdates:
    """Updates the trainable tables of one compiled and built model.

    `slots` has for each shard its layer, its index there, its slots by name.
    """

    @classmethod
    def of(cls, model: keras.Model) -> "TableUpdates | None":
        """Returns what updates a model's tables; None if it has none."""
        if not tables.layers_of(model):
            return None
        with tf.init_scope():  # A step may be being traced.
            return cls(model)

    def __init__(self, model: keras.Model) -> None:
        """Makes the slots, each beside its shard."""
        self.optimizer = model.optimizer
        self._rule = rules.rule_for(model.optimizer)
        layers = [
            layer
            for layer in tables.layers_of(model)
            if layer.trainable or layer.slots
        ]
        slots = make_slots(
            self._rule, model.optimizer, layers, model.distribute_strategy
        )
        self.slots: TableSlots = [
            (layer, index, own)
            for layer, found in zip(layers, slots, strict=True)
            for index, own in enumerate(found)
        ]

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates all variables once, and the step counter.

        `gradients` are summed over the replicas, None for a Keras variable
        that has none.
        """
        layers = {
            id(layer.shards[index]): layer for layer, index, _ in self.slots
        }
        owners = [layers.get(id(variable)) for variable in variables]
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

    def _update_tables(self, gradients: dict[int, Any], hyper: Any) -> None:
        updates = []
        for layer, index, slots in self.slots:
            shard = layer.shards[index]
            slices = gradients.get(id(shard))
            if slices is not None:
                rows = (slices.indices, slices.values)
                updates.append((shard.value, slots, rows))
        if not replicas.in_replica():
            for variable, slots, (rows, values) in updates:
                self._rule.apply_rows(variable, slots, rows, values, hyper)
            return
        targets = [(variable, slots) for variable, slots, _ in updates]

        def update_copies(strategy: Any, slices: Any, hyper: Any) -> None:
            for (variable, slots), (rows, values) in zip(
                targets, slices, strict=True
            ):
                strategy.extended.update(
                    variable,
                    self._rule.apply_rows,
                    args=(slots, rows, values, hyper),
                    group=False,
                )

        tf.distribute.get_replica_context().merge_call(
            update_copies, args=([rows for *_, rows in updates], hyper)
        )


def make_slots(
    rule: rules.UpdateRule,
    optimizer: keras.optimizers.Optimizer,
    layers: Sequence[embedding_layer.ShardedEmbedding],
    strategy: tf.distribute.Strategy,
) -> list[Sequence[Mapping[str, tf.Variable]]]:
    """Returns for each layer what is kept of its shards, by name.

    Made beside these, but of a column of ids, which no optimizer moves.
    """
    found: list[Sequence[Mapping[str, tf.Variable]]] = []
    for layer in layers:
        if isinstance(layer, dynamic.IdColumn):
            found.append(layer.slots)
            continue
        shards = [shard.value for shard in layer.shards]
        found.append(rules.make_slots(rule, shards, strategy))
        if isinstance(layer, dynamic.DynamicEmbedding):
            layer.moved_by(optimizer, found[-1], rule.slots)
    return found


def _distinct(gradient: Any, layer: Any) -> Any:
    """Makes each row come once: sums over replicas and lookups repeat it."""
    if isinstance(gradient, tf.IndexedSlices):
        return table_rows.sum_per_row(gradient)
    if gradient is not None and layer is not None:
        raise ValueError(
            f"The table of the layer {layer.name!r} must be used only by "
            "lookups; received a gradient for all its rows. Call the layer, "
            "outside of loops, instead of using its variables."
        )
    return gradient


def dense_variables(model: keras.Model) -> list[Any]:
    """Returns the trainable variables that are left to Keras' optimizer."""
    of_tables = {
        id(shard) for layer in tables.layers_of(model) for shard in layer.shards
    }
    return [v for v in model.trainable_variables if id(v) not in of_tables]
