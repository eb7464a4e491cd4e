"""One small collective by which all workers of a group decide alike."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdistill import chief_only


class Agreement:
    """Sums a vector of whole numbers over workers, and one over replicas."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        replica_values: Callable[[], tf.Tensor],
        *,
        size: int,
    ) -> None:
        """Traces nothing yet.

        Args:
            strategy: The strategy in use.
            replica_values: Returns each replica's int64 vector, in graph.
            size: Length of the workers' vector.
        """
        self._strategy = strategy
        self._replica_values = replica_values
        num_workers = chief_only.num_workers(strategy)
        num_local = strategy.num_replicas_in_sync // num_workers

        def in_replica(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group % num_local == 0
            both = tf.concat(
                [
                    tf.where(first, values, tf.zeros_like(values)),
                    tf.cast(self._replica_values(), tf.int64),
                ],
                axis=0,
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, both)

        @tf.function(input_signature=[tf.TensorSpec([size], tf.int64)])
        def summed(values: tf.Tensor) -> tf.Tensor:
            return strategy.run(in_replica, args=(values,))

        self._summed = summed
        self._size = size

    def sum(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the group; every worker must call it at the same step.

        Args:
            values: This worker's int64 vector of length `size`.

        Returns:
            The sum over the workers and the sum of the replicas' vectors.
        """
        result = self._summed(tf.constant(values, tf.int64))
        local = self._strategy.experimental_local_results(result)[0].numpy()
        return local[: self._size], local[self._size :]
