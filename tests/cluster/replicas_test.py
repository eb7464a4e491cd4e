"""Numbers that all workers get to know."""

import tensorflow as tf

from tfdistill.cluster import replicas


def test_alone_there_is_nobody_to_ask():
    strategy = tf.distribute.get_strategy()
    assert replicas.WorkerValues(strategy).gathered(7) == [7]
    assert replicas.local_replicas(strategy) == [0]


def test_each_replica_has_a_place(two_replicas):
    values = replicas.WorkerValues(two_replicas)
    assert values.gathered(2**40) == [2**40] * 2
    assert values.gathered(-1) == [-1] * 2
    assert replicas.local_replicas(two_replicas) == [0, 1]
