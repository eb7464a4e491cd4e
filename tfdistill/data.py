"""Which examples are read where: a group's share, then a worker's share.

Take the group's share before anything random and before batching: a data set
that each group shuffles its own way cannot be cut into disjoint parts.
"""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data_checks
from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.data_checks import DataError
from tfdistill.data_checks import checked
from tfdistill.system import keras_internals

__all__ = [
    "DataError",
    "check_batch_size",
    "checked",
    "group_shard",
    "resumable",
    "shuffled_batches",
    "shuffled_indices",
    "worker_shard",
]


_MODES = ("disjoint", "shared", "coordinated")


def group_shard(
    examples: object,
    cluster: identity.Cluster | None = None,
    *,
    mode: str = "disjoint",
) -> Any:
    """Returns the part of the examples that this group trains on.

    Example i goes to group `i % num_groups`. With a data set, every group still
    reads (and skips) the others' elements; with many files, shard the file
    names.

    Args:
        examples: A `tf.data.Dataset`, in the same order in every group; not yet
            batched, or whole batches are dealt out; not yet shuffled, or parts
            may overlap. Or an array `[examples, ...]`, or a dict, tuple or list
            of them, nested at will, with equally many examples.
        cluster: Says which group this is. Default: `Cluster.from_env()`.
        mode: `"disjoint"` (default; the better choice in Anil et al. 2018,
            section 3.3) or `"shared"`: all of the data in every group; or
            `"coordinated"`: all of the data in the same order, for groups that
            learn from each other's predictions of the same batch. What comes
            after must be equal in all groups, too: give `shuffle` and random
            augmentation a seed, and `shuffled_indices` no `group`.

    Returns:
        The group's data set, or the same structure of its arrays.

    Raises:
        ValueError: If the mode is unknown, arrays do not have equally many
            examples, or a group would have none.

    Example:
        >>> cluster = identity.Cluster(group=1, num_groups=2)
        >>> part = group_shard(tf.data.Dataset.range(5), cluster)
        >>> [int(element) for element in part]
        [1, 3]
        >>> group_shard({"x": np.arange(5)}, cluster)["x"].tolist()
        [1, 3]
    """
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {_MODES}; received {mode!r}.")
    cluster = cluster or identity.Cluster.from_env()
    mode = method.share(cluster.method, mode, num_groups=cluster.num_groups)
    if not isinstance(examples, tf.data.Dataset):
        return _shard_arrays(examples, cluster, mode)
    if mode == "coordinated":
        options = tf.data.Options()
        options.deterministic = True
        return examples.with_options(options)
    if mode == "shared" or cluster.num_groups == 1:
        return examples
    # Not known while a function for workers is traced.
    number = tf.get_static_value(examples.cardinality())
    data_checks.check_parts(
        -1 if number is None else number, cluster.num_groups
    )
    # A pipeline has another order each time that it is read.
    if any(
        vars(each).get("_reshuffle_each_iteration")
        for each in keras_internals.pipeline_of(examples)
    ):
        warnings.warn(
            "This data set is shuffled before it is split among the groups, "
            "so their parts may overlap. Call group_shard() first, then "
            "shuffle; or shuffle with seed=... and "
            "reshuffle_each_iteration=False.",
            stacklevel=2,
        )
    return examples.shard(cluster.num_groups, cluster.group)


def _shard_arrays(arrays: object, cluster: identity.Cluster, mode: str) -> Any:
    shapes = [tuple(np.shape(leaf)) for leaf in keras.tree.flatten(arrays)]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or () in shapes:
        raise ValueError(
            "All arrays must have the same number of examples in their first "
            f"dimension; received {len(shapes)}, of shapes {shapes[:9]}."
        )
    if mode != "disjoint" or cluster.num_groups == 1:
        return arrays
    data_checks.check_parts(lengths.pop(), cluster.num_groups)
    return keras.tree.map_structure(
        lambda array: array[cluster.group :: cluster.num_groups], arrays
    )


def worker_shard(
    dataset: tf.data.Dataset,
    cluster: identity.Cluster,
    *,
    global_batch_size: int,
) -> tf.data.Dataset:
    """Marks where in a pipeline each worker drops the others' elements.

    Otherwise they are dropped behind the last transformation, so that every
    worker decodes whole global batches. Of each of those a worker gets every
    n-th element, not one run of them: as a set the batch stays the same.
    If one process reads all, or the workers cannot share a batch evenly,
    nothing is marked. The data set must be endless and not yet batched (if it
    ends, workers get an empty batch), and only `fit` can read it.
    """
    num_workers = cluster.num_workers
    has_servers = cluster.uses_parameter_servers
    if num_workers == 1 or has_servers or global_batch_size % num_workers:
        return dataset
    hint, options = tf.data.experimental.SHARD_HINT, tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.HINT
    )
    return dataset.shard(hint, hint).with_options(options)


def shuffled_indices(
    num_examples: int, *, seed: int, group: int = 0, first: int = 0
) -> tf.data.Dataset:
    """Returns an endless data set of indices, each epoch in a new order.

    The order depends only on the arguments, not on global seeds or on how
    often it was read: all workers of a group see the same one, and `first=n`
    continues a run exactly, as `skip(n)` does, but at once.

    Args:
        num_examples: Indices run from 0 to `num_examples - 1`; >= 1.
        seed: Seed of the run.
        group: Groups get different orders. Default 0.
        first: Indices to leave out, >= 0, of any number of epochs. Default 0.

    Returns:
        A data set of int64 scalars.

    Raises:
        ValueError: If there are no examples, or `first` is negative.

    Example:
        >>> epoch = shuffled_indices(4, seed=1).take(4)
        >>> sorted(int(index) for index in epoch)
        [0, 1, 2, 3]
    """
    if num_examples < 1:
        raise ValueError(
            f"`num_examples` must be >= 1; received {num_examples}."
        )
    if first < 0:
        raise ValueError(f"`first` must be >= 0; received {first}.")
    base = tf.constant([seed, group], tf.int64)

    @tf.autograph.experimental.do_not_convert
    def epoch_indices(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(num_examples, dtype=tf.int64),
            seed=tf.random.experimental.stateless_fold_in(base, epoch),
        )
        return tf.data.Dataset.from_tensor_slices(order)

    epoch, left_out = divmod(first, num_examples)
    epochs = tf.data.Dataset.range(epoch, tf.int64.max)
    indices = epochs.flat_map(epoch_indices)
    return indices.skip(left_out) if left_out else indices


def resumable(make: Callable[[int], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns `make(0)`, which a resumed `fit` reads as `make(n)`.

    With any other data set, a resumed `fit` must read past the first n batches,
    which at 20 ms a batch takes half an hour after 90,000 steps.

    Args:
        make: Makes the data set from a number of batches on, with the elements
            of `make(0).skip(number)`. Anything random in it depends only on
            that number, not on earlier draws.

    Returns:
        The data set. Pass it to `fit` unchanged: after a transformation it is
        like any other data set.

    Example:
        >>> def batches(first):
        ...     rows = shuffled_indices(4, seed=1, first=2 * first)
        ...     return rows.batch(2)
        >>> train = resumable(batches)
    """
    return _remade(make(0), make)


def check_batch_size(
    batch_size: int, *, num_examples: int, examples: str = "examples"
) -> None:
    """Checks that a group's share fills at least one batch."""
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            "`batch_size` must be from 1 to the group's "
            f"{num_examples} training {examples}; received {batch_size}."
        )


def shuffled_batches(
    num_examples: int,
    *,
    batch_size: int,
    seed: int,
    group: int,
    read: Callable[[tf.data.Dataset, int], tf.data.Dataset],
    examples: str = "examples",
) -> tf.data.Dataset:
    """Returns endless full batches of a group's examples; `resumable`.

    Args:
        num_examples: The size of the group's share.
        batch_size: The size of a batch of the whole group.
        seed: Draws the order, as in `shuffled_indices`.
        group: The group's index, for another order in each.
        read: Makes the batches, of a dataset of indices, int64 `[batch_size]`,
            and of the first batch's number.
        examples: What an error calls them.

    Raises:
        ValueError: They fill no batch.
    """
    check_batch_size(batch_size, num_examples=num_examples, examples=examples)

    def batches(first: int) -> tf.data.Dataset:
        indices = shuffled_indices(
            num_examples, seed=seed, group=group, first=first * batch_size
        )
        rows = indices.batch(batch_size, drop_remainder=True)
        return read(rows, first).prefetch(tf.data.AUTOTUNE)

    return resumable(batches)


def _remade(
    dataset: tf.data.Dataset, make: Callable[[Any], Any]
) -> tf.data.Dataset:
    dataset._from_batch = make
    return dataset


def from_batch(dataset: object, number: int) -> tf.data.Dataset | None:
    """Makes a `resumable` data set from a batch on; None of any other."""
    make = vars(dataset).get("_from_batch")
    return make and make(number)


def repeated_from(dataset: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """Returns a data set, again and again, from a number of batches on.

    One that is `resumable` and whose length is unknown has no end.
    """
    is_endless = dataset.cardinality() < 0
    made = from_batch(dataset, number) if is_endless else None
    found = dataset.repeat().skip(number) if made is None else made.repeat()
    return found.prefetch(2)


def made_again_as(
    dataset: tf.data.Dataset, other: tf.data.Dataset
) -> tf.data.Dataset:
    """Returns `other`, of the same elements, `resumable` as a data set is."""
    make = vars(dataset).get("_from_batch")
    return other if make is None else _remade(other, make)


def _with_options(
    dataset: tf.data.Dataset, options: tf.data.Options
) -> tf.data.Dataset:
    """Sets options; what is `resumable` remains so."""
    result = dataset.with_options(options)
    make = vars(dataset).get("_from_batch")
    if make is None:
        return result
    return _remade(result, lambda first: make(first).with_options(options))


def by_element(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Shards a data set by element unless its user chose a policy.

    TensorFlow's automatic choice is by file if possible, which gives the
    workers other examples than one process would have in the same batch, and
    otherwise warns.
    """
    policy = tf.data.experimental.AutoShardPolicy
    options = tf.data.Options()
    if dataset.options().experimental_distribute.auto_shard_policy not in (
        None,
        policy.AUTO,
    ):
        return dataset
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return _with_options(dataset, options)


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches tf.data's autotuning off, for an end of `fit` without a stall.

    See `keras_internals.prepare`. What asks for
    `tf.data.AUTOTUNE` gets TensorFlow's default parallelism.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return _with_options(dataset, options)
