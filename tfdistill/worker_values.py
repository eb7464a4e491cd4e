"""A number of each worker, told to all of them by one small collective."""

import tensorflow as tf


class WorkerValues:
    """Gathers numbers over one group; traced once."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Traces nothing yet.

        Args:
            strategy: The strategy in use.
        """
        self._strategy = strategy

        def in_replica(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # A value of this replica, or nobody knows where it is to go.
            return context.all_gather(tf.identity(value), axis=0)

        @tf.function(input_signature=[tf.TensorSpec([1], tf.int64)])
        def gather(value: tf.Tensor) -> tf.Tensor:
            return strategy.run(in_replica, args=(value,))

        self._gather = gather

    def gathered(self, value: int) -> list[int]:
        """Gathers a number; all workers call it at the same point.

        Args:
            value: This worker's number, as int64 has it.

        Returns:
            One number for each replica, in the order of the workers.
        """
        if self._strategy.num_replicas_in_sync == 1:
            return [value]
        found = self._gather(tf.constant([value], tf.int64))
        local = self._strategy.experimental_local_results(found)
        return local[0].numpy().tolist()


def local_replicas(strategy: tf.distribute.Strategy) -> list[int]:
    """Returns the indices of this worker's replicas among all of the group.

    Args:
        strategy: The strategy in use.
    """
    if strategy.num_replicas_in_sync == 1:
        return [0]

    @tf.function
    def ask() -> tf.Tensor:
        return strategy.run(
            lambda: tf.distribute.get_replica_context().replica_id_in_sync_group
        )

    found = strategy.experimental_local_results(ask())
    return [int(index) for index in found]
