"""Rows of a sharded table for ids, each row fetched once.

What travels between a worker and the shards is one row for each distinct id,
and one summed gradient back.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill import row_layout


def look_up(
    sources: Sequence[Any],
    layout: row_layout.RowLayout,
    storage_rows: tf.Tensor,
    *,
    dtype: Any,
    on_devices: bool = False,
) -> tf.Tensor:
    """Returns rows; the tape sees one gradient row for each distinct id.

    Args:
        sources: The shards `[rows_i, dim]`: variables, for which the tape
            yields `tf.IndexedSlices` with distinct rows, or tensors.
        layout: The layout with as many shards as there are sources.
        storage_rows: int64 `[num_ids]`, stored rows.
        dtype: Of the result; gradients are summed in that of the sources.
        on_devices: Whether to gather on each source's own device.

    Returns:
        `[num_ids, dim]`.
    """
    distinct, positions = tf.unique(storage_rows)
    if len(sources) == 1:
        rows = _gather(sources[0], layout.as_index(distinct), on_devices)
        return _expand(rows, positions, dtype)
    shards, local_rows = layout.split(distinct)
    num_shards = len(sources)
    parts = tf.dynamic_partition(local_rows, shards, num_shards)
    places = tf.dynamic_partition(
        tf.range(tf.size(distinct)), shards, num_shards
    )
    found = [
        _gather(source, part, on_devices)
        for source, part in zip(sources, parts, strict=True)
    ]
    rows = tf.dynamic_stitch(places, found)
    return _expand(rows, positions, dtype)


def read_only(
    source: Any, layout: row_layout.RowLayout, storage_rows: tf.Tensor
) -> tf.Tensor:
    """Returns rows of one whole table, where no gradient is wanted."""
    return tf.gather(source, layout.as_index(storage_rows))


def _gather(source: Any, rows: tf.Tensor, on_device: bool) -> tf.Tensor:
    if hasattr(source, "gather_rows"):
        return source.gather_rows(rows)
    if not on_device:
        return tf.gather(source, rows)
    with tf.device(source.device):
        return tf.gather(source, rows)


def _expand(rows: tf.Tensor, positions: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Repeats rows; the gradients of one row are summed before they leave."""

    @tf.custom_gradient
    def expand(rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: Any) -> tf.Tensor:
            segments = positions
            if isinstance(upstream, tf.IndexedSlices):
                segments = tf.gather(positions, upstream.indices)
                upstream = upstream.values
            return tf.math.unsorted_segment_sum(
                tf.cast(upstream, rows.dtype), segments, tf.shape(rows)[0]
            )

        return tf.gather(tf.cast(rows, dtype), positions), gradient

    return expand(rows)


def sum_per_row(
    gradient: tf.IndexedSlices,
) -> tf.IndexedSlices:
    """Sums slices of the same row, so that each row comes once."""
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, positions, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def combine(vectors: Any, combiner: str | None) -> Any:
    """Reduces the vectors of each bag of ids to one.

    Args:
        vectors: Floats, dense `[..., k, dim]` or ragged `[batch, (k), dim]`.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`: over the number of ids, or
            over its square root. None returns the vectors as they are.

    Returns:
        `[..., dim]`, zeros for a bag without ids.
    """
    if combiner is None:
        return vectors
    if isinstance(vectors, tf.RaggedTensor):
        bag_of, num_bags = vectors.value_rowids(), vectors.nrows()
        total = tf.math.unsorted_segment_sum(vectors.values, bag_of, num_bags)
        sizes = tf.cast(vectors.row_lengths(), total.dtype)[:, tf.newaxis]
    else:
        total = tf.reduce_sum(vectors, axis=-2)
        sizes = tf.cast(tf.shape(vectors)[-2], total.dtype)
    if combiner == "sum":
        return total
    divisor = sizes if combiner == "mean" else tf.sqrt(sizes)
    return tf.math.divide_no_nan(total, divisor)
