"""Where a step's gradients are computed, clipped and applied under servers."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import rules
from tfdistill.embedding import updates
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
        self._rule = rules.rule_for(optimizer)
        self._dense = [v.value for v in variables.trainable]
        self.dense_slots = rules.make_slots(self._rule, self._dense, strategy)
        slots = updates.make_slots(
            self._rule, optimizer, variables.tables, strategy
        )
        self.shard_slots = [own for found in slots for own in found]
        self._packed = remote_variables.PackedVariables(self._dense)
        # Of all shards but those of columns of ids.
        self._layers: list[Any] = []
        self._shards: list[tf.Variable] = []
        self._moving_slots: list[Any] = []
        for layer, found in zip(variables.tables, slots, strict=True):
            for shard, own in zip(layer.shards, found, strict=True):
                if shard.value.dtype.is_floating:
                    self._layers.append(layer)
                    self._shards.append(shard.value)
                    self._moving_slots.append(own)

    def tape(self) -> "StepTape":
        """Returns a tape over the values that the step has of variables.

        Call it inside the `keras.StatelessScope` of the step.
        """
        values = [variable.value for variable in self._variables.trainable]
        return StepTape(values, self._layers)

    def apply(self, tape: "StepTape", loss: tf.Tensor) -> None:
        """Updates all variables once; `tape` is of `tape`."""
        num_dense = len(tape.values)
        gradients = tape.gradient(loss, [*tape.values, *self._shards])
        # Sums over the lookups of a layer that was called several times.
        gradients[num_dense:] = [
            table_rows.sum_per_row(gradient)
            if gradient is not None and layer.num_lookups - before > 1
            else gradient
            for gradient, layer, before in zip(
                gradients[num_dense:],
                self._layers,
                tape.lookups_before,
                strict=True,
            )
        ]
        gradients = rules.clip(
            self._optimizer,
            gradients,
            groups=[None] * num_dense + [id(layer) for layer in self._layers],
        )
        hyper = self._rule.hyperparameters(
            tf.convert_to_tensor(self._optimizer.iterations)
        )
        there, hypers = self._packed.bring(gradients[:num_dense], hyper)
        for variable, slots, gradient in zip(
            self._dense, self.dense_slots, there, strict=True
        ):
            if gradient is not None:
                found = hypers.get(variable.device, hyper)
                self._rule.apply_dense(variable, slots, gradient, found)
        for variable, slots, rows in zip(
            self._shards, self._moving_slots, gradients[num_dense:], strict=True
        ):
            if rows is not None:
                found = hypers.get(variable.device, hyper)
                self._rule.apply_rows(
                    variable, slots, rows.indices, rows.values, found
                )


class StepTape(tf.GradientTape):
    """Records a step on the values of the dense trainable variables."""

    def __init__(
        self, values: Sequence[tf.Tensor], layers: Sequence[Any]
    ) -> None:
        """Takes the values, and the layer of each shard."""
        super().__init__()
        self.values = list(values)
        # For each shard, how often its table was looked up before the step.
        self.lookups_before = [layer.num_lookups for layer in layers]

    def __enter__(self) -> "StepTape":
        """Starts to record."""
        super().__enter__()
        self.watch(self.values)
        return self


def _check_constraints(variables: Sequence[Any]) -> None:
    constrained = [v.path for v in variables if v.constraint is not None]
    if constrained:
        raise ValueError(
            "Variables on parameter servers must have no constraint: updates "
            f"run there as single operations; received {constrained}. Use a "
            "regularizer instead."
        )
