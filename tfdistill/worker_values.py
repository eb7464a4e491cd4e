"""A number of each worker, told to all of them by one small collective."""

import tensorflow as tf


def gathered(strategy: tf.distribute.Strategy, value: int) -> list[int]:
    """Gathers a number over the group; all workers call it at one point.

    Args:
        strategy: The strategy in use.
        value: This worker's number, as int64 has it.

    Returns:
        One number for each replica, in the order of the workers.
    """
    if strategy.num_replicas_in_sync == 1:
        return [value]

    @tf.function
    def gather() -> tf.Tensor:
        def in_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_gather(tf.constant([value], tf.int64), axis=0)

        return strategy.run(in_replica)

    return strategy.experimental_local_results(gather())[0].numpy().tolist()


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
