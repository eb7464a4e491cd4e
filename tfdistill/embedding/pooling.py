"""Sums over bags of ids, made on the servers that hold the rows.

What travels is each id, and for each bag and shard the number of its ids, one
vector back and one gradient; and not a row, and its gradient, for each distinct
id (DES: Zhang et al., arXiv:1909.04823).
"""

from typing import Any

import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import tables


def sums(
    table: tables.Table,
    storage_rows: tf.Tensor,
    bags: tf.Tensor,
    num_bags: tf.Tensor,
    *,
    squares: bool,
    differentiable: bool,
) -> tf.Tensor:
    """Returns the sum of each bag's rows, `[num_bags, dim]`.

    `storage_rows` are int64 `[num_ids]`, and `bags`, int32 `[num_ids]`, in
    order. With `squares`, a last column has the sum of the rows' squared norms.
    If it is `differentiable`, the tape sees the shards; their gradients are
    `tf.IndexedSlices` with distinct rows, on the shards' devices.
    """
    by_shard = table.layout.partition(storage_rows, bags)
    return tf.add_n(
        [
            _sum_of_shard(
                shard.value, rows, bags, num_bags, squares, differentiable
            )
            for shard, (rows, bags) in zip(table.shards, by_shard, strict=True)
        ]
    )


def _sum_of_shard(
    source: Any,
    rows: tf.Tensor,
    bags: tf.Tensor,
    num_bags: tf.Tensor,
    squares: bool,
    differentiable: bool,
) -> tf.Tensor:
    # A count for each bag is shorter than a bag for each id.
    counts = tf.math.unsorted_segment_sum(tf.ones_like(bags), bags, num_bags)
    with tf.device(source.device):
        bags = _bag_of_each(counts, tf.size(rows))
        vectors = summands = tf.gather(source, rows)
        if squares:
            summands = table_rows.with_squared_norms(vectors)
        total = tf.math.unsorted_segment_sum(summands, bags, tf.size(counts))

    def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
        upstream = tf.convert_to_tensor(upstream)
        with tf.device(source.device):
            of_id = tf.gather(upstream, bags)
            if squares:
                of_id, of_norm = of_id[:, :-1], of_id[:, -1:]
                of_id += 2 * of_norm * vectors
            shape = tf.constant(source.shape.as_list(), tf.int64)
            return table_rows.sum_per_row(tf.IndexedSlices(of_id, rows, shape))

    # By the handle: `tf.custom_gradient` reads all of a variable that it finds
    # within. The gradient of `tf.gather` would be made on the worker.
    @tf.custom_gradient
    def with_gradient(handle: tf.Tensor) -> tuple[tf.Tensor, Any]:
        del handle
        return total, gradient

    return with_gradient(source.handle) if differentiable else total


def _bag_of_each(counts: tf.Tensor, num_ids: tf.Tensor) -> tf.Tensor:
    """Returns `[num_ids]` that are 0 `counts[0]` times, then 1, and so on."""
    ends = tf.cumsum(counts)
    begun = tf.math.unsorted_segment_sum(tf.ones_like(ends), ends, num_ids + 1)
    return tf.cumsum(begun)[:num_ids]
