"""A model's variables as a worker of a parameter-server group sees them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import embedding
from tfdistill import packed_variables
from tfdistill import updates


class RemoteVariables:
    """A model's variables, sorted by how a worker comes by their values.

    Attributes:
        trainable: Dense trainable Keras variables.
        others: Keras variables that the optimizer does not train, such as
            moving statistics.
        metrics: The metrics' Keras variables.
        shards: The row shards of all tables.
        optimizer: The optimizer's own scalars but its step counter.
    """

    def __init__(self, model: keras.Model) -> None:
        """Sorts them.

        Args:
            model: A built and compiled model.
        """
        self.tables = embedding.layers_of(model)
        self.shards = [s for layer in self.tables for s in layer.shards]
        self.trainable = updates.dense_variables(model)
        self.metrics = [v for m in model.metrics for v in m.variables]
        known = {id(v) for v in self.shards + self.trainable + self.metrics}
        self.others = [v for v in model.variables if id(v) not in known]
        optimizer = model.optimizer
        self.iterations: Any = optimizer.iterations if optimizer else None
        self.optimizer = [
            v
            for v in (optimizer.variables if optimizer else [])
            if v is not self.iterations
        ]
        self._packed = packed_variables.PackedVariables(
            [v.value for v in self.trainable + self.others]
        )
        self._packed_with_optimizer = packed_variables.PackedVariables(
            [v.value for v in self.trainable + self.others + self.optimizer]
        )
        self._packed_others = packed_variables.PackedVariables(
            [v.value for v in self.others]
        )

    def read(self) -> list[tf.Tensor]:
        """Reads `trainable` and `others`, in this order."""
        return self._packed.read()

    def read_with_optimizer(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Reads what `read` does, and the optimizer's scalars with it.

        Callbacks may change these, the learning rate above all. Had the
        coordinator read them for every execution, it would wait for a server
        each time.
        """
        values = self._packed_with_optimizer.read()
        count = len(self._packed)
        return values[:count], values[count:]

    def assign_others(
        self, scope: keras.StatelessScope, before: Sequence[tf.Tensor]
    ) -> None:
        """Writes back what the step changed of `others`.

        Args:
            scope: The step's scope.
            before: The values that were read.
        """
        after = [scope.get_current_value(v) for v in self.others]
        self._packed_others.assign(
            [
                None if new is old else tf.cast(new, old.dtype)
                for new, old in zip(after, before, strict=True)
            ]
        )
