"""Where a step's gradients are computed, clipped and applied under servers."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import tables
from tfdistill.embedding import updates
from tfdistill.parameter_server import fetching
from tfdistill.parameter_server import variables as remote_variables


class RemoteUpdate:
    """Computes gradients on the worker and updates where variables live.

    Attributes:
        rule: How the optimizer changes them.
        dense: The dense variables that are trained.
        dense_slots: What the optimizer keeps for each of them.
        shards: All shards of tables that change, with their slots.
        moving: The shards that are trained.
        fetching: How steps come by what they read.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: remote_variables.RemoteVariables,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Makes the optimizer's slots, each beside its variable."""
        _check_constraints([*variables.trainable, *variables.shards])
        self._optimizer = optimizer
        self._variables = variables
        self.rule = rules.UpdateRule(
            optimizer, has_tables=bool(variables.tables)
        )
        self.dense = [v.value for v in variables.trainable]
        self.dense_slots = [
            self.rule.make_slots(variable, strategy) for variable in self.dense
        ]
        self.shards = updates.make_shards(
            self.rule, optimizer, variables.tables, strategy
        )
        self._packed = remote_variables.PackedVariables(self.dense)
        self.moving = [
            shard
            for shard in self.shards
            if shard.table.is_trained and shard.table.layer.trainable
        ]
        self._update_rows = [
            self.rule.in_turns(shard.value, shard.slots)
            for shard in self.moving
        ]
        self.fetching = fetching.Fetching(variables)

    def tape(self) -> "StepTape":
        """Returns a tape over the values that the step has of variables.

        Call it inside the `keras.StatelessScope` of the step.
        """
        values = [variable.value for variable in self._variables.trainable]
        return StepTape(values, self.moving, self.fetching.parts)

    def apply(self, tape: "StepTape", loss: tf.Tensor) -> None:
        """Updates all variables once; `tape` is of `tape`."""
        shards = [shard.value for shard in self.moving]
        dense, of_shards, of_parts = tape.gradient(
            loss, [tape.values, shards, [part.value for part in tape.parts]]
        )
        self._assign(tape)
        places = {id(shard): place for place, shard in enumerate(shards)}
        for part, gradient in zip(tape.parts, of_parts, strict=True):
            place = places[id(part.shard)]
            of_shards[place] = _with_rows(of_shards[place], gradient, part.rows)
        # Sums over the lookups of a layer that was called several times.
        of_shards = [
            table_rows.sum_per_row(gradient)
            if gradient is not None and shard.table.num_lookups - before > 1
            else gradient
            for gradient, shard, before in zip(
                of_shards, self.moving, tape.lookups_before, strict=True
            )
        ]
        clipped = rules.clip(
            self._optimizer,
            [*dense, *of_shards],
            groups=[None] * len(dense) + [each.table for each in self.moving],
        )
        dense, of_shards = clipped[: len(dense)], clipped[len(dense) :]
        hyper = self.rule.hyperparameters(
            tf.convert_to_tensor(self._optimizer.iterations)
        )
        there, hypers = self._packed.bring(dense, hyper)
        for variable, slots, gradient in zip(
            self.dense, self.dense_slots, there, strict=True
        ):
            if gradient is not None:
                found = hypers.get(variable.device, hyper)
                self.rule.apply_dense(variable, slots, gradient, found)
        for shard, update, gradient in zip(
            shards, self._update_rows, of_shards, strict=True
        ):
            if gradient is not None:
                found = hypers.get(shard.device, hyper)
                with tf.device(shard.device):
                    update(gradient.indices, gradient.values, found)
        by_shard = dict(zip(places, of_shards, strict=True))
        self.fetching.updated(dense, by_shard, hyper)

    def _assign(self, tape: "StepTape") -> None:
        """Writes what the step assigned to variables that it then updates."""
        assigned = [
            None if variable.value is old else variable.value
            for variable, old in zip(
                self._variables.trainable, tape.values, strict=True
            )
        ]
        self._packed.assign(assigned, tape.values)
        self.fetching.assigned(assigned)


class StepTape(tf.GradientTape):
    """Records a step on the values of the dense trainable variables."""

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        moving: Sequence[tables.Shard],
        parts: Sequence[fetching.Part],
    ) -> None:
        """Takes the values, the shards that are trained, rows read ahead."""
        super().__init__()
        self.values = list(values)
        trained = {id(shard.value) for shard in moving}
        self.parts = [part for part in parts if id(part.shard) in trained]
        # For each shard, how often its table was looked up before the step.
        self.lookups_before = [shard.table.num_lookups for shard in moving]

    def __enter__(self) -> "StepTape":
        """Starts to record."""
        super().__enter__()
        self.watch([*self.values, *(part.value for part in self.parts)])
        return self


def _with_rows(
    slices: tf.IndexedSlices | None, gradient: tf.Tensor | None, rows: tf.Tensor
) -> tf.IndexedSlices | None:
    """Adds the gradient of some rows to the slices of a shard."""
    if gradient is None:
        return slices
    if slices is None:
        return tf.IndexedSlices(gradient, rows)
    return tf.IndexedSlices(
        tf.concat([slices.values, gradient], axis=0),
        tf.concat([slices.indices, rows], axis=0),
    )


def _check_constraints(variables: Sequence[Any]) -> None:
    constrained = [v.path for v in variables if v.constraint is not None]
    if constrained:
        raise ValueError(
            "Variables on parameter servers must have no constraint: updates "
            f"run there as single operations; received {constrained}. Use a "
            "regularizer instead."
        )
