"""Training updates: tables by their touched rows, the rest by Keras.

Keras' optimizers update an `IndexedSlices` gradient at a cost that grows with
the table. Here the gradients of `ShardedEmbedding` are summed per id over all
replicas, clipped together with the others, and applied by one fused operation
for each shard on each replica. All other variables are left to Keras.
"""

import typing
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import layer as embedding_layer
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules

# See `tfdistill.training.multi_worker`: a mixin must not be a `keras.Model`.
_Base: Any = keras.Model if typing.TYPE_CHECKING else object

TableSlots = list[tuple[embedding_layer.ShardedEmbedding, int, dict[str, Any]]]


class TableTraining(_Base):
    """The part of a model's training that updates its variables."""

    def apply_summed_gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor
    ) -> None:
        """Sums the gradients over the replicas, then updates the variables.

        Args:
            tape: The tape that recorded `loss`.
            loss: This replica's share of the loss, scaled for the optimizer.
        """
        variables = self.trainable_weights
        gradients = tape.gradient(loss, variables)
        if replicas.in_replica():
            gradients = replicas.summed(gradients)
        tables = self.table_updates()
        if tables is None:
            self.optimizer.apply(gradients, variables)
        else:
            tables.apply(gradients, variables)

    def table_updates(self) -> "TableUpdates | None":
        """Returns what updates the tables; None for a model without any."""
        made = getattr(self, "_table_updates", None)
        if made is None or made.optimizer is not self.optimizer:
            if not embedding_layer.layers_of(self):
                return None
            with tf.init_scope():
                made = TableUpdates(self)
            # A plain object: Keras and checkpoints look past it.
            self._table_updates = made
        return made

    @property
    def table_slots(self) -> TableSlots:
        """What the optimizer keeps for tables: layer, shard, slots by name.

        Made when the model first trains, or when they are first asked for.
        """
        tables = self.table_updates()
        return [] if tables is None else tables.slots


class TableUpdates:
    """Updates the trainable tables of one compiled and built model.

    Attributes:
        optimizer: The optimizer whose rule is followed.
        slots: For each shard: its layer, its index there, its slots by name.
    """

    def __init__(self, model: keras.Model) -> None:
        """Makes the slots, each beside its shard.

        Args:
            model: The model.

        Raises:
            ValueError: The optimizer has no fused form.
        """
        self.optimizer = model.optimizer
        self._rule = rules.rule_for(model.optimizer)
        places = [
            (layer, index)
            for layer in embedding_layer.layers_of(model)
            if layer.trainable
            for index in range(len(layer.shards))
        ]
        slots = rules.make_slots(
            self._rule,
            [layer.shards[index].value for layer, index in places],
            model.distribute_strategy,
        )
        self.slots: TableSlots = [
            (*place, own) for place, own in zip(places, slots, strict=True)
        ]

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates all variables once, and the step counter.

        Args:
            gradients: Summed over the replicas; None where there is none.
            variables: Their Keras variables.
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


def _distinct(gradient: Any, layer: Any) -> Any:
    """Makes each row come once: sums over replicas and lookups repeat it."""
    if isinstance(gradient, tf.IndexedSlices):
        return table_rows.sum_per_row(gradient)
    if gradient is not None and layer is not None:
        raise ValueError(
            f"The table of the layer {layer.name!r} must be used by lookups "
            "alone; received a gradient for all its rows. Call the layer, "
            "outside of loops, instead of using its variables."
        )
    return gradient


def dense_variables(model: keras.Model) -> list[Any]:
    """Returns the trainable variables that are left to Keras' optimizer.

    Args:
        model: A built model.
    """
    of_tables = {
        id(shard)
        for layer in embedding_layer.layers_of(model)
        for shard in layer.shards
    }
    return [v for v in model.trainable_variables if id(v) not in of_tables]
