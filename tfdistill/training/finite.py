"""Whether a model's weights are finite, on all workers of a group."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import rows as table_rows


class Weights:
    """The weights of one model, each looked at where it lies."""

    def __init__(self, model: keras.Model) -> None:
        """Looks at nothing yet."""
        self._model = model
        self._workers = replicas.WorkerValues(model.distribute_strategy)

    def first_not_finite(self) -> str | None:
        """Returns the path of a weight that holds NaN or infinity, if any.

        All workers of a group call it at the same step and get the same
        answer, though moving statistics are each replica's own.
        """
        strategy = self._model.distribute_strategy
        floats = [
            variable
            for variable in self._model.variables
            if tf.as_dtype(variable.dtype).is_floating
        ]
        if not floats:
            return None
        found = [
            tf.reduce_all([_is_finite(copy) for copy in copies])
            for copies in (
                strategy.experimental_local_results(v.value) for v in floats
            )
        ]
        bad = np.flatnonzero(
            [not is_fine for is_fine in tf.stack(found).numpy()]
        )
        first = int(bad[0]) if bad.size else -1
        if replicas.num_workers(strategy) > 1:
            first = max(self._workers.gathered(first))
        return None if first < 0 else floats[first].path


def _is_finite(variable: Any) -> tf.Tensor:
    """Looks at a variable on its device, and at a large one in blocks."""
    with tf.device(variable.device):
        value = tf.convert_to_tensor(variable)
        size = value.shape.num_elements()
        if size <= table_rows.BLOCK_ELEMENTS:
            return tf.reduce_all(tf.math.is_finite(value))
        num_rows = int(value.shape[0])
        block = table_rows.rows_per_block(size // num_rows)
        return tf.reduce_all(
            [
                tf.reduce_all(tf.math.is_finite(value[first : first + block]))
                for first in range(0, num_rows, block)
            ]
        )
