"""What every worker must agree on before it reads its share of the data."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import keras_internals


def by_element(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Shards a data set by element wherever its user chose no policy.

    TensorFlow's automatic choice is by file where it can, which gives the
    workers other examples than one process would have in the same batch, and
    a warning where it cannot.

    Args:
        dataset: Batched by the global batch size.

    Returns:
        The data set with `AutoShardPolicy.DATA`, or as it was.
    """
    policy = tf.data.experimental.AutoShardPolicy
    options = tf.data.Options()
    if dataset.options().experimental_distribute.auto_shard_policy not in (
        None,
        policy.AUTO,
    ):
        return dataset
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)


def at_workers_share(
    dataset: tf.data.Dataset, cluster: Any, *, global_batch_size: int
) -> tf.data.Dataset:
    """Marks where in a pipeline each worker is to drop the others' elements.

    Otherwise they are dropped behind the last transformation, so that every
    worker decodes whole global batches. Of each of those a worker gets every
    n-th element, not one run of them: as a set the batch stays the same.
    Where one process reads all, there is nothing to mark.

    Args:
        dataset: Endless, not yet batched; by `fit` alone it can be read.
            (Where a marked one ends, workers get an empty batch.)
        cluster: The task; a `tfdistill.Cluster`, or only a `GroupIdentity`,
            which means one worker.
        global_batch_size: What the elements are batched by afterwards. The
            mark is left out where the workers cannot share it evenly.

    Returns:
        The data set, marked or as it was.
    """
    num_workers = getattr(cluster, "num_workers", 1)
    has_servers = getattr(cluster, "uses_parameter_servers", False)
    if num_workers == 1 or has_servers or global_batch_size % num_workers:
        return dataset
    hint, options = tf.data.experimental.SHARD_HINT, tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.HINT
    )
    return dataset.shard(hint, hint).with_options(options)


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches tf.data's autotuning off, for an end of `fit` without a stall.

    See `keras_internals.pass_batches_on_without_autotune`. What asks for
    `tf.data.AUTOTUNE` gets TensorFlow's default parallelism.

    Args:
        dataset: Any data set.

    Returns:
        The same elements.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def prepare(x: Any, shuffle: Any, strategy: tf.distribute.Strategy) -> Any:
    """Makes all workers read the same batches, each its own rows of them.

    Args:
        x: What `fit`, `evaluate` or `predict` was given as data.
        shuffle: Whether Keras will shuffle arrays.
        strategy: The strategy in use.

    Returns:
        The data to hand on.
    """
    if isinstance(x, tf.data.Dataset):
        return by_element(x)
    if shuffle and not isinstance(x, tf.distribute.DistributedDataset):
        _agree_on_seed(strategy)
    return x


def _agree_on_seed(strategy: tf.distribute.Strategy) -> None:
    """Gives all workers the first worker's seed, for Keras' shuffle.

    Keras shuffles arrays with the global seed. Workers that shuffle
    differently train on some examples twice and on others never.
    """
    seed = keras_internals.global_seed()
    own = -1 if seed is None else seed % 2**31
    if own < 0:
        own = int.from_bytes(os.urandom(4), "big") % 2**31
    seeds = of_all_workers(strategy, [own])[:, 0].tolist()
    if len(set(seeds)) == 1 and seed is not None:
        return
    if seed is not None:
        warnings.warn(
            "The workers set different random seeds; the first worker's "
            f"({seeds[0]}) is used by all, so that they shuffle alike. "
            "Call keras.utils.set_random_seed with one seed on all workers.",
            stacklevel=5,
        )
    tf.random.set_seed(seeds[0])


def of_all_workers(
    strategy: tf.distribute.Strategy, values: Sequence[int]
) -> np.ndarray:
    """Returns the values that each worker has passed; a collective.

    Args:
        strategy: A strategy over several workers, all of which call.
        values: Equally many on each.

    Returns:
        int64 `[replicas, values]`.
    """

    @tf.function
    def gather() -> tf.Tensor:
        def in_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_gather(tf.constant([values], tf.int64), axis=0)

        return strategy.run(in_replica)

    return strategy.experimental_local_results(gather())[0].numpy()
