"""Gradients computed on a worker, applied where the variables live."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import fused_updates
from tfdistill import packed_variables
from tfdistill import remote_variables
from tfdistill import row_lookup


class RemoteUpdate:
    """Computes gradients on the worker and updates where variables live."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: remote_variables.RemoteVariables,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Makes the optimizer's slots, each beside its variable.

        Args:
            optimizer: One that `fused_updates` knows.
            variables: The model's.
            strategy: The strategy of the model.

        Raises:
            ValueError: The optimizer or a variable asks for what fused
                updates cannot do.
        """
        _check_constraints([*variables.trainable, *variables.shards])
        self._optimizer = optimizer
        self._variables = variables
        self._rule = fused_updates.rule_for(optimizer)
        self._dense = [v.value for v in variables.trainable]
        self._shards = [v.value for v in variables.shards]
        slots = fused_updates.make_slots(
            self._rule, self._dense + self._shards, strategy
        )
        self.dense_slots = slots[: len(self._dense)]
        self.shard_slots = slots[len(self._dense) :]
        self._packed = packed_variables.PackedVariables(self._dense)
        self._layers = [
            layer for layer in variables.tables for _ in layer.shards
        ]
        self._values: list[tf.Tensor] = []
        self._lookups_before: list[int] = []

    @contextlib.contextmanager
    def tape(self, values: Sequence[tf.Tensor]) -> Iterator[tf.GradientTape]:
        """Records a step that uses `values` as the trainable variables."""
        self._values = list(values)
        self._lookups_before = [layer.num_lookups for layer in self._layers]
        with tf.GradientTape() as tape:
            tape.watch(self._values)
            yield tape

    def apply(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        """Updates all variables once.

        Args:
            tape: What `tape` gave, after the forward pass.
            loss: float scalar.
        """
        num_dense = len(self._values)
        gradients = tape.gradient(loss, [*self._values, *self._shards])
        gradients[num_dense:] = self._one_per_row(gradients[num_dense:])
        gradients = fused_updates.clip(
            self._optimizer,
            gradients,
            groups=[None] * num_dense + [id(layer) for layer in self._layers],
        )
        hyper = self._rule.hyperparameters(
            tf.convert_to_tensor(self._optimizer.iterations)
        )
        there, hypers = self._packed.bring_with(gradients[:num_dense], hyper)
        for variable, slots, gradient in zip(
            self._dense, self.dense_slots, there, strict=True
        ):
            if gradient is not None:
                found = hypers.get(variable.device, hyper)
                self._rule.apply_dense(variable, slots, gradient, found)
        for variable, slots, rows in zip(
            self._shards, self.shard_slots, gradients[num_dense:], strict=True
        ):
            if rows is not None:
                found = hypers.get(variable.device, hyper)
                self._rule.apply_rows(
                    variable, slots, rows.indices, rows.values, found
                )

    def _one_per_row(self, gradients: list[Any]) -> list[Any]:
        """Sums over the lookups of a layer that was called several times."""
        return [
            row_lookup.sum_per_row(gradient)
            if gradient is not None and layer.num_lookups - before > 1
            else gradient
            for gradient, layer, before in zip(
                gradients, self._layers, self._lookups_before, strict=True
            )
        ]


def _check_constraints(variables: Sequence[Any]) -> None:
    constrained = [v.path for v in variables if v.constraint is not None]
    if constrained:
        raise ValueError(
            "Variables on parameter servers must have no constraint: updates "
            f"run there as single operations; received {constrained}. Use a "
            "regularizer instead."
        )
