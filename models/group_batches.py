"""Batches of a group's own share of the training examples."""

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


def shuffled_indices(
    num_examples: int,
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    seed: int,
    examples: str,
) -> tf.data.Dataset:
    """Returns endless full batches of indices of a group's examples.

    int64 `[batch_size]`, in the order that the seed and the group
    choose.
    """
    check_size(batch_size, num_examples=num_examples, examples=examples)
    indices = data.shuffled_indices(
        num_examples, seed=seed, group=cluster.group
    )
    return indices.batch(batch_size, drop_remainder=True)
