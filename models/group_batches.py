"""Batches of a group's own share of the training examples."""

from collections.abc import Callable

import tensorflow as tf

import tfdistill
from tfdistill import data


def check_size(batch_size: int, *, num_examples: int, examples: str) -> None:
    """Checks that a group's share fills at least one batch."""
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            "`batch_size` must be from 1 to the group's "
            f"{num_examples} training {examples}; received {batch_size}."
        )


def shuffled(
    num_examples: int,
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    seed: int,
    examples: str,
    read: Callable[[tf.data.Dataset, int], tf.data.Dataset],
) -> tf.data.Dataset:
    """Returns endless full batches of a group's examples; resumable.

    `read` makes them of batches of indices, int64 `[batch_size]`, in the order
    that the seed and the group choose, and of the first one's number.
    """
    check_size(batch_size, num_examples=num_examples, examples=examples)

    def batches(first: int) -> tf.data.Dataset:
        indices = data.shuffled_indices(
            num_examples,
            seed=seed,
            group=cluster.group,
            first=first * batch_size,
        )
        rows = indices.batch(batch_size, drop_remainder=True)
        return read(rows, first).prefetch(tf.data.AUTOTUNE)

    return data.resumable(batches)
