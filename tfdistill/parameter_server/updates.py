"""Where a step's gradients are computed, clipped and applied under servers."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import tables
from tfdistill.embedding import updates
from tfdistill.parameter_server import ahead
from tfdistill.parameter_server import variables as remote_variables


class RemoteUpdate:
    """Computes gradients on the worker and updates where variables live."""

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
        self._rule = rules.rule_for(
            optimizer, has_tables=bool(variables.tables)
        )
        self._dense = [v.value for v in variables.trainable]
        self.dense_slots = rules.make_slots(self._rule, self._dense, strategy)
        self.shards = updates.make_shards(
            self._rule, optimizer, variables.tables, strategy
        )
        self._packed = remote_variables.PackedVariables(self._dense)
        # Those that are trained.
        self._moving = [
            shard
            for shard in self.shards
            if shard.table.is_trained and shard.table.layer.trainable
        ]
        # Where each of these shards is among them, by id.
        self._places = {
            id(shard.value): place for place, shard in enumerate(self._moving)
        }
        # What fetches rows ahead; None if each step fetches its own.
        self.ahead: ahead.RowsAhead | None = None

    def fetch_ahead(
        self, model: keras.Model, num_batches: int
    ) -> ahead.RowsAhead:
        """Makes steps find rows that were fetched so many batches ahead."""
        self.ahead = ahead.RowsAhead(
            model,
            self._variables,
            rule=self._rule,
            dense_slots=self.dense_slots,
            shard_slots={
                id(shard.value): shard.slots for shard in self._moving
            },
            num_ahead=num_batches,
        )
        return self.ahead

    def tape(self) -> "StepTape":
        """Returns a tape over the values that the step has of variables.

        Call it inside the `keras.StatelessScope` of the step.
        """
        values = [variable.value for variable in self._variables.trainable]
        fetched = [] if self.ahead is None else self.ahead.parts
        parts = [part for part in fetched if id(part.shard) in self._places]
        owners = [shard.table for shard in self._moving]
        return StepTape(values, owners, parts)

    def apply(self, tape: "StepTape", loss: tf.Tensor) -> None:
        """Updates all variables once; `tape` is of `tape`."""
        shards = [shard.value for shard in self._moving]
        dense, of_shards, of_parts = tape.gradient(
            loss, [tape.values, shards, [part.value for part in tape.parts]]
        )
        self._assign(tape)
        for part, gradient in zip(tape.parts, of_parts, strict=True):
            place = self._places[id(part.shard)]
            of_shards[place] = _with_rows(of_shards[place], gradient, part.rows)
        # Sums over the lookups of a layer that was called several times.
        of_shards = [
            table_rows.sum_per_row(gradient)
            if gradient is not None and shard.table.num_lookups - before > 1
            else gradient
            for gradient, shard, before in zip(
                of_shards, self._moving, tape.lookups_before, strict=True
            )
        ]
        clipped = rules.clip(
            self._optimizer,
            [*dense, *of_shards],
            groups=[None] * len(dense) + [each.table for each in self._moving],
        )
        dense, of_shards = clipped[: len(dense)], clipped[len(dense) :]
        hyper = self._rule.hyperparameters(
            tf.convert_to_tensor(self._optimizer.iterations)
        )
        there, hypers = self._packed.bring(dense, hyper)
        for variable, slots, gradient in zip(
            self._dense, self.dense_slots, there, strict=True
        ):
            if gradient is not None:
                found = hypers.get(variable.device, hyper)
                self._rule.apply_dense(variable, slots, gradient, found)
        for shard, rows in zip(self._moving, of_shards, strict=True):
            if rows is not None:
                found = hypers.get(shard.value.device, hyper)
                self._rule.apply_rows(
                    shard.value, shard.slots, rows.indices, rows.values, found
                )
        if self.ahead is not None:
            by_shard = dict(zip(self._places, of_shards, strict=True))
            self.ahead.updated(dense, by_shard, hyper)

    def _assign(self, tape: "StepTape") -> None:
        """Writes what the step assigned to variables that it then updates."""
        assigned = [
            None if variable.value is old else variable.value
            for variable, old in zip(
                self._variables.trainable, tape.values, strict=True
            )
        ]
        self._packed.assign(assigned, tape.values)
        if self.ahead is not None:
            others = [None] * len(self._variables.others)
            self.ahead.assigned([*assigned, *others])


class StepTape(tf.GradientTape):
    """Records a step on the values of the dense trainable variables."""

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        owners: Sequence[tables.Table],
        parts: Sequence[ahead.Part] = (),
    ) -> None:
        """Takes the values, the table of each shard, and rows fetched ahead."""
        super().__init__()
        self.values = list(values)
        self.parts = list(parts)
        # For each shard, how often its table was looked up before the step.
        self.lookups_before = [table.num_lookups for table in owners]

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
