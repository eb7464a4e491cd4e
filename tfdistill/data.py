"""Who reads which examples: a group's share first, then a worker's share.

Take the group's share before anything random and before batching: a data set
that each group shuffles its own way cannot be cut into disjoint parts.
"""

import warnings
from collections.abc import Callable
from typing import Any
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data_checks

__all__ = [
    "GroupIdentity",
    "dirichlet_shard",
    "distribute",
    "group_shard",
    "per_worker_batch_size",
    "shard_arrays",
    "shuffled_indices",
    "worker_shard",
]

_MODES = ("disjoint", "shared", "coordinated")
# Draws of proportions among which each group's part of the data is balanced.
_MOST_DRAWS = 100


class GroupIdentity(Protocol):
    """What this module needs of a `tfdistill.Cluster`."""

    @property
    def group(self) -> int:
        """Index of this group, from 0."""

    @property
    def num_groups(self) -> int:
        """Number of groups in the run."""


def group_shard(
    dataset: tf.data.Dataset,
    cluster: GroupIdentity,
    *,
    mode: str = "disjoint",
) -> tf.data.Dataset:
    """Returns the part of a data set that this group trains on.

    Element i goes to group `i % num_groups`. Every group still reads (and
    skips) the others' elements; with many files, shard the file names.

    Args:
        dataset: In the same order in every group; not yet batched, or whole
            batches are dealt out; not yet shuffled, or parts may overlap.
        cluster: Says which group this is.
        mode: `"disjoint"` (default; the better choice in Anil et al. 2018,
            section 3.3) or `"shared"`: all of the data in every group; or
            `"coordinated"`: all of the data in the same order, for groups that
            learn from each other's predictions of the same batch. What comes
            after must be equal in all groups, too: give `shuffle` and random
            augmentation a seed, and `shuffled_indices` no `group`.

    Returns:
        The group's data set.

    Raises:
        ValueError: If the mode is unknown, or a group would have no element.

    Example:
        >>> import types
        >>> cluster = types.SimpleNamespace(group=1, num_groups=2)
        >>> part = group_shard(tf.data.Dataset.range(5), cluster)
        >>> [int(element) for element in part]
        [1, 3]
    """
    _check_mode(mode)
    if mode == "coordinated":
        return _in_one_order(dataset)
    if mode == "shared" or cluster.num_groups == 1:
        return dataset
    data_checks.check_parts(dataset, cluster.num_groups, "group")
    _warn_if_shuffled(dataset, "group_shard")
    return dataset.shard(cluster.num_groups, cluster.group)


def dirichlet_shard(
    dataset: tf.data.Dataset,
    cluster: GroupIdentity,
    *,
    alpha: float,
    seed: int,
    label: Callable[..., tf.Tensor] | None = None,
    num_classes: int | None = None,
) -> tf.data.Dataset:
    """Returns a part of a data set in which some labels are rare.

    For each label, the groups' proportions are drawn from a Dirichlet
    distribution whose parameters are all `alpha` (Hsu et al. 2019,
    arXiv:1909.06335, by label as in Yurochkin et al. 2019, arXiv:1905.12022).
    With `alpha=0.1` most examples of a label are one group's; with 100 the
    parts are nearly alike. Parts are disjoint and cover all of the data. At any
    point of the stream, a group has had its proportion of each label to within
    about one example. The proportions are drawn anew, up to 100 times, until
    each group's part is half of an equal part or more, as Lin et al. 2021
    (arXiv:2102.04761) do in their code; else the most even draw counts.

    Elements are filtered as they are read; every group reads them all.

    Args:
        dataset: In the same order in every group, not yet batched, repeated or
            shuffled. Elements `(x, y)` or `(x, y, sample_weight)`.
        cluster: Says which group this is.
        alpha: > 0.
        seed: Seed of the proportions, the same in all groups.
        label: Called with an element as a function in `dataset.map` is; returns
            its label, an integer scalar >= 0. Default None: y. For one-hot
            targets: `lambda x, y: tf.argmax(y)`.
        num_classes: Number of labels, taken to be equally frequent. Default
            None: the labels are counted in a first pass over the data.

    Returns:
        The group's data set.

    Raises:
        ValueError: If a number is out of range, labels are not integers, or the
            data never end and `num_classes` is not given.
        DataError: If a group would have no element.

    Example:
        >>> import types
        >>> cluster = types.SimpleNamespace(group=1, num_groups=2)
        >>> examples = tf.data.Dataset.range(8).map(lambda i: (i, i % 2))
        >>> part = dirichlet_shard(examples, cluster, alpha=0.5, seed=3)
        >>> [int(x) for x, _ in part]
        [0, 3, 4, 6]
    """
    if not alpha > 0:
        raise ValueError(f"`alpha` must be > 0; received {alpha}.")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"`num_classes` must be >= 1; received {num_classes}.")
    label_of = _checked_label(dataset, label)
    if cluster.num_groups == 1:
        return dataset
    data_checks.check_parts(dataset, cluster.num_groups, "group")
    _warn_if_shuffled(dataset, "dirichlet_shard")
    counts = np.ones(num_classes or 0)
    if num_classes is None:
        counts = _label_counts(dataset.map(label_of))
    shares = _dirichlet_shares(
        counts, cluster.num_groups, alpha=alpha, seed=seed
    )
    # A label is dealt out in whole elements, the first to its largest share.
    whole = np.floor(counts[:, np.newaxis] * shares)
    whole[counts > 0, shares[counts > 0].argmax(axis=1)] += 1
    if num_classes is None and not whole.sum(axis=0).min() >= 1:
        raise data_checks.DataError(
            "Each group must get at least one element; received "
            f"{counts.sum():.0f} elements of {len(counts)} labels for "
            f"{cluster.num_groups} groups and alpha={alpha}. Use fewer groups, "
            "or a larger `alpha`."
        )
    table, group = tf.constant(shares), cluster.group

    def deal(dealt: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        # To whoever is furthest behind its proportion of this label.
        index = label_of(*_as_arguments(element))
        in_range = tf.debugging.assert_less(
            index,
            tf.cast(len(shares), index.dtype),
            message=f"Labels must be < num_classes, which is {len(shares)}.",
        )
        with tf.control_dependencies([in_range]):
            index = tf.identity(index)
        had = tf.gather(dealt, index)
        due = tf.gather(table, index) * (tf.reduce_sum(had) + 1.0)
        taker = tf.argmax(due - had)
        dealt = tf.tensor_scatter_nd_add(dealt, [[index, taker]], [1.0])
        return dealt, (taker, element)

    start = tf.zeros(table.shape, table.dtype)
    return (
        dataset.scan(start, deal)
        .filter(lambda taker, _: tf.equal(taker, group))
        .map(lambda _, element: element)
    )


def shard_arrays(
    arrays: Any, cluster: GroupIdentity, *, mode: str = "disjoint"
) -> Any:
    """Returns this group's examples of in-memory arrays; see `group_shard`.

    Args:
        arrays: An array `[examples, ...]`, or a dict, tuple or list of them,
            nested at will, with equally many examples.
        cluster: Says which group this is.
        mode: `"disjoint"` (default), or `"shared"` or `"coordinated"`, which
            are the same for arrays.

    Returns:
        The same structure, with the examples that `group_shard` would give.

    Raises:
        ValueError: If the mode is unknown, the arrays do not have equally
            many examples, or a group would have none.

    Example:
        >>> import types
        >>> cluster = types.SimpleNamespace(group=0, num_groups=2)
        >>> part = shard_arrays({"x": np.arange(5)}, cluster)
        >>> part["x"].tolist()
        [0, 2, 4]
    """
    _check_mode(mode)
    shapes = [tuple(np.shape(leaf)) for leaf in keras.tree.flatten(arrays)]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or () in shapes:
        raise ValueError(
            "All arrays must have the same number of examples in their first "
            f"dimension; received shapes {shapes}."
        )
    if mode != "disjoint" or cluster.num_groups == 1:
        return arrays
    data_checks.check_parts(lengths.pop(), cluster.num_groups, "group")
    return keras.tree.map_structure(
        lambda array: array[cluster.group :: cluster.num_groups], arrays
    )


def worker_shard(
    dataset: tf.data.Dataset,
    worker: tf.distribute.InputContext | tuple[int, int],
) -> tf.data.Dataset:
    """Returns the part of the group's data set that one worker reads.

    Args:
        dataset: The group's part, in the same order on all its workers.
        worker: A `tf.distribute.InputContext`, or `(num_workers, index)`.

    Returns:
        Every `num_workers`-th element, from `index` on.

    Raises:
        ValueError: If the index is not that of a worker, or a worker would
            have no element.

    Example:
        >>> part = worker_shard(tf.data.Dataset.range(5), (2, 0))
        >>> [int(element) for element in part]
        [0, 2, 4]
    """
    if isinstance(worker, tf.distribute.InputContext):
        num_workers = worker.num_input_pipelines
        index = worker.input_pipeline_id
    else:
        num_workers, index = worker
    if not 0 <= index < num_workers:
        raise ValueError(
            "A worker must be given as (num_workers, index) with 0 <= index < "
            f"num_workers; received ({num_workers}, {index})."
        )
    data_checks.check_parts(dataset, num_workers, "worker")
    return dataset.shard(num_workers, index)


def per_worker_batch_size(global_batch_size: int, num_workers: int) -> int:
    """Returns the share of a global batch that one worker takes.

    Args:
        global_batch_size: Examples per step of the whole group, >= 1.
        num_workers: Workers (or replicas) that share them, >= 1.

    Raises:
        ValueError: If it cannot be shared out evenly.

    Example:
        >>> per_worker_batch_size(64, num_workers=4)
        16
    """
    if global_batch_size < 1 or num_workers < 1:
        raise ValueError(
            "`global_batch_size` and `num_workers` must be >= 1; received "
            f"{global_batch_size} and {num_workers}."
        )
    share, rest = divmod(global_batch_size, num_workers)
    if rest:
        below, above = share * num_workers, (share + 1) * num_workers
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            "`global_batch_size` must be a multiple of the number of workers; "
            f"received {global_batch_size} for {num_workers}. Use {sizes}."
        )
    return share


def distribute(
    strategy: tf.distribute.Strategy,
    make_dataset: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    *,
    global_batch_size: int,
    prepare: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None,
    drop_remainder: bool = False,
) -> tf.distribute.DistributedDataset:
    """Returns a data set of which each worker reads only its own part.

    A batched `tf.data.Dataset` given to `fit` is read completely by every
    worker, which keeps its own rows of each batch. Here a worker skips the
    others' elements before `prepare` spends time on them.

    Args:
        strategy: The strategy in use.
        make_dataset: Called on each worker with its
            `tf.distribute.InputContext`; gives the group's data set, unbatched
            and in the same order on all workers. `group_shard` belongs here.
        global_batch_size: Examples per step of the whole group.
        prepare: Applied to the worker's part before it is batched: shuffle,
            repeat, decode, augment. Default None.
        drop_remainder: Drop a partial last batch. Default False.

    Returns:
        Batches to give to `fit`, with `steps_per_epoch` if they never end.

    Raises:
        ValueError: If the batch size cannot be shared by the replicas.
    """
    size = per_worker_batch_size(
        global_batch_size, strategy.num_replicas_in_sync
    )

    def make_part(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = worker_shard(make_dataset(context), context)
        part = prepare(part) if prepare else part
        part = part.batch(size, drop_remainder=drop_remainder)
        return part.prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(make_part)


def shuffled_indices(
    num_examples: int, *, seed: int, group: int = 0
) -> tf.data.Dataset:
    """Returns an endless data set of indices, each epoch in a new order.

    The order depends only on the arguments, not on global seeds or on how
    often it was read: all workers of a group see the same one, and `skip(n)`
    continues a run exactly.

    Args:
        num_examples: Indices run from 0 to `num_examples - 1`; >= 1.
        seed: Seed of the run.
        group: Groups get different orders. Default 0.

    Returns:
        A data set of int64 scalars.

    Raises:
        ValueError: If there are no examples.

    Example:
        >>> epoch = shuffled_indices(4, seed=1).take(4)
        >>> sorted(int(index) for index in epoch)
        [0, 1, 2, 3]
    """
    if num_examples < 1:
        raise ValueError(
            f"`num_examples` must be >= 1; received {num_examples}."
        )
    base = tf.constant([seed, group], tf.int64)

    def epoch_indices(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(num_examples, dtype=tf.int64),
            seed=tf.random.experimental.stateless_fold_in(base, epoch),
        )
        return tf.data.Dataset.from_tensor_slices(order)

    epochs = tf.data.Dataset.range(tf.int64.max)
    return epochs.flat_map(epoch_indices)


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"`mode` must be one of {_MODES}; received {mode!r}.")


def _as_arguments(element: Any) -> tuple[Any, ...]:
    """An element as `Dataset.map` passes it to a function."""
    return element if isinstance(element, tuple) else (element,)


def _checked_label(
    dataset: tf.data.Dataset, label: Callable[..., tf.Tensor] | None
) -> Callable[..., tf.Tensor]:
    """What takes an element's parts and returns its label, int64."""

    def of_pair(x: Any, y: Any, sample_weight: Any = None) -> tf.Tensor:
        del x, sample_weight
        return y

    spec = dataset.element_spec
    found: Any = None
    if label is not None:
        found = dataset.map(label).element_spec
    elif isinstance(spec, tuple) and len(spec) in (2, 3):
        label, found = of_pair, spec[1]
    is_label = isinstance(found, tf.TensorSpec) and found.dtype.is_integer
    if label is None or not is_label or found.shape.rank != 0:
        raise ValueError(
            "A label must be an integer scalar, one for each element; received "
            f"{found if found is not None else spec}. Shard before batching, "
            "and pass `label`, which finds the label of an element, as in "
            "label=lambda x, y: tf.argmax(y)."
        )
    chosen = label
    return lambda *parts: tf.cast(chosen(*parts), tf.int64)


def _label_counts(labels: tf.data.Dataset) -> np.ndarray:
    """How often each label comes, float64 `[labels]`; one pass."""
    if labels.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`num_classes` must be given for data that never end; received "
            "None. Pass it, or call dirichlet_shard() before repeat()."
        )
    counts = np.zeros(0, np.int64)
    for batch in labels.batch(8192).as_numpy_iterator():
        if batch.min() < 0:
            raise ValueError(f"Labels must be >= 0; received {batch.min()}.")
        counts = np.bincount(batch, minlength=len(counts)) + np.pad(
            counts, (0, max(0, batch.max() + 1 - len(counts)))
        )
    return counts.astype("float64")


def _dirichlet_shares(
    counts: np.ndarray, num_groups: int, *, alpha: float, seed: int
) -> np.ndarray:
    """Each label's proportions, float64 `[labels, groups]`; rows sum to 1."""
    best, most = np.zeros([len(counts), num_groups]), 0.0
    for draw in range(_MOST_DRAWS):
        generator = np.random.default_rng([seed, draw])
        shares = generator.dirichlet([alpha] * num_groups, size=len(counts))
        smallest = (counts @ shares).min()
        if smallest > most:
            best, most = shares, smallest
        if most >= 0.5 * counts.sum() / num_groups:
            break
    return best


def _warn_if_shuffled(dataset: tf.data.Dataset, function: str) -> None:
    if _is_shuffled(dataset):
        warnings.warn(
            "This data set is shuffled before the groups' parts are taken, so "
            f"the parts may overlap. Call {function}() first, then shuffle; "
            "or shuffle with seed=... and reshuffle_each_iteration=False.",
            stacklevel=3,
        )


def _in_one_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A data set that has the same order in all groups, and in each pass."""
    if _has_random_order(dataset):
        raise ValueError(
            'With mode="coordinated" all groups must read the same order; '
            "received a data set that is shuffled without a seed. Pass "
            "shuffle(..., seed=...), the same in all groups, or call "
            "tf.random.set_seed before."
        )
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _has_random_order(dataset: tf.data.Dataset) -> bool:
    """Whether a shuffle without a seed was found; see `_is_shuffled`."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if hasattr(dataset, "_reshuffle_each_iteration") and not any(
        seed is None or int(seed) for seed in seeds
    ):
        return True
    return any(map(_has_random_order, getattr(dataset, "_inputs", list)()))


def _is_shuffled(dataset: tf.data.Dataset) -> bool:
    """Whether an iteration order that may differ by group was found."""
    # TensorFlow has no public way to look at a pipeline; without these
    # private names nothing is found, and nothing is warned of.
    reshuffles = getattr(dataset, "_reshuffle_each_iteration", False)
    return reshuffles is not False or any(
        _is_shuffled(source) for source in getattr(dataset, "_inputs", list)()
    )


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
    return dataset.with_options(options)


def at_workers_share(
    dataset: tf.data.Dataset, cluster: Any, *, global_batch_size: int
) -> tf.data.Dataset:
    """Marks where in a pipeline each worker is to drop the others' elements.

    Otherwise they are dropped behind the last transformation, so that every
    worker decodes whole global batches. Of each of those a worker gets every
    n-th element, not one run of them: as a set the batch stays the same.
    If one process reads all, or the workers cannot share a batch evenly, or
    `cluster` is only a `GroupIdentity`, nothing is marked. The data set must be
    endless and not yet batched (if it ends, workers get an empty batch), and
    only `fit` can read it.
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
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
