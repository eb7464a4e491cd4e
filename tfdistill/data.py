"""Which examples are read where: a group's share, then a worker's share.

Take the group's share before anything random and before batching: a data set
that each group shuffles its own way cannot be cut into disjoint parts.

And which are refused. TensorFlow trains on silently when a feature is NaN, and
every weight is NaN from then on. A label beyond the number of classes is an
error on a CPU, and a loss of NaN elsewhere.
"""

import contextlib
import re
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.cluster import method
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
# Around a message, to find it in what TensorFlow makes of an error.
_MARKED = re.compile(r"<data>(.*?)</data>", re.DOTALL)
_SPARSE_LABEL = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of "
    r"\[0, (\d+)\)"
)
_REMEDY = "Fix or remove the example"


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
    check_parts(-1 if number is None else number, cluster.num_groups)
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
    check_parts(lengths.pop(), cluster.num_groups)
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


class DataError(ValueError):
    """The data are missing, faulty, or too few."""


def checked(
    dataset: tf.data.Dataset,
    *,
    num_classes: int | None = None,
) -> tf.data.Dataset:
    """Returns the same data set, which fails at the first faulty batch.

    Features, targets and weights of a floating dtype must be finite, and class
    indices within their range. The check runs in the input pipeline, parallel
    to training. `fit` ends with a `DataError`.

    Args:
        dataset: Elements `x`, `(x, y)` or `(x, y, sample_weight)`, batched or
            not. Later steps of the pipeline are not checked.
        num_classes: Classes that all integer targets are indices of. Default
            None: not checked.

    Returns:
        The same elements.

    Raises:
        ValueError: If `num_classes` is not positive, or no target is of
            integers.

    Example:
        >>> import numpy as np
        >>> rows = np.float32([[1.0], [np.nan]])
        >>> dataset = checked(tf.data.Dataset.from_tensor_slices(rows).batch(2))
        >>> try:
        ...     with told():
        ...         next(iter(dataset))
        ... except DataError as error:
        ...     print(str(error).split(".")[0])
        x must be finite; received nan at [1 0] of batch 0
    """
    targets = [
        name
        for name, value in _named(dataset.element_spec)
        if name.startswith("y")
        and not keras_internals.is_none(value)
        and value.dtype.is_integer
    ]
    if num_classes is not None and (num_classes < 1 or not targets):
        raise ValueError(
            "`num_classes` must be >= 1, and the data set must have such "
            f"integer targets; received {num_classes} for {targets or 'none'}."
        )

    def check(number: tf.Tensor, element: object) -> Any:
        faults = [
            fault
            for name, value in _named(element)
            if value is not None
            for fault in _faults(
                name, value, num_classes if name in targets else None
            )
        ]
        checks = [_refuse(number, *fault) for fault in faults]
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf),
                element,
                expand_composites=True,
            )

    return dataset.enumerate().map(check, num_parallel_calls=tf.data.AUTOTUNE)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns TensorFlow's error over faulty data into a `DataError`.

    Such an error was caused by `checked`, or by a label that a loss refuses.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        marked = _MARKED.search(error.message)
        if marked:
            raise DataError(marked[1]) from error
        label = _SPARSE_LABEL.search(error.message)
        if label:
            raise DataError(
                f"Labels must be from 0 to {int(label[2]) - 1}, one for each "
                f"output; received {label[1]}. {_REMEDY}, give the model more "
                "outputs, or find the batch with "
                "tfdistill.data.checked(dataset, num_classes=...)."
            ) from error
        raise


def check_parts(number: int, num_groups: int) -> None:
    """Checks that each group gets one of a number of elements, if known."""
    if 0 <= number < num_groups:
        raise DataError(
            "Disjoint parts need at least one element per group; received "
            f"{number} elements for {num_groups} groups. Use "
            'mode="shared", or shard before batching.'
        )


def _named(element: object) -> list[tuple[str, Any]]:
    """Leaves of an element, each with the name that messages give it."""
    parts = keras.utils.unpack_x_y_sample_weight(element)
    return [
        (name + "".join(f"[{key}]" for key in path), leaf)
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=True)
        if part is not None
        for path, leaf in keras.tree.flatten_with_path(part)
    ]


def _faults(name: str, value: Any, num_classes: int | None) -> Any:
    """Yields what must hold, and a mask of where it does not."""
    if isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    if isinstance(value, tf.SparseTensor):
        value = value.values
    if value.dtype.is_floating:
        yield f"{name} must be finite", value, ~tf.math.is_finite(value)
    if num_classes is not None:
        yield (
            f"{name} must be from 0 to {num_classes - 1}",
            value,
            (value < 0) | (value >= tf.cast(num_classes, value.dtype)),
        )


def _refuse(
    number: tf.Tensor, wanted: str, value: tf.Tensor, faulty: tf.Tensor
) -> tf.Operation:
    def fail() -> tf.Tensor:
        where = tf.where(faulty)[0]
        message = tf.strings.format(
            f"<data>{wanted}; received {{}} at {{}} of batch {{}}. {_REMEDY}."
            "</data>",
            (tf.gather_nd(value, where), where, number),
        )
        with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
            return tf.constant(False)

    return tf.cond(tf.reduce_any(faulty), fail, lambda: tf.constant(True)).op
