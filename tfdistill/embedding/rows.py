"""Where an id's row lies, how rows are fetched, and overwritten in place.

What travels between a worker and the shards is one row for each distinct id,
and one summed gradient back.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.embedding import sources as sources_lib

SHARDINGS = ("hash", "contiguous")
# The largest id times the multiplier (0.618 of the rows) must fit in int64.
_MOST_HASHED_ROWS = 3_000_000_000
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
# As large as a block of rows may be in memory beside its table: 2**22 floats,
# 16 MB. Initial values depend on it.
BLOCK_ELEMENTS = 2**22


def rows_per_block(dim: int) -> int:
    """Returns how many rows are drawn, read or written at once."""
    return max(1, BLOCK_ELEMENTS // dim)


def blocks(num_rows: int, dim: int) -> list[tuple[int, int]]:
    """Returns the first row of each block, and the first behind it."""
    size = rows_per_block(dim)
    return [
        (first, min(first + size, num_rows))
        for first in range(0, num_rows, size)
    ]


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the rows of a table lie: id -> stored row -> (shard, local row).

    The stored order depends only on `num_rows` and `sharding`. Shards are
    slices of it, so that files in stored order suit any number of shards.

    Attributes:
        num_rows: Number of ids, and of rows.
        sharding: `"hash"` spreads neighboring ids, whose low numbers are often
            the frequent ones, evenly over the table (multiplicative hashing:
            Knuth, The Art of Computer Programming 3, 6.4); `"contiguous"`
            stores row i at i.
        num_shards: Number of slices; their sizes differ by one unit at most.
        unit: Rows that stay together in one slice.

    Raises:
        ValueError: An attribute is out of its range.
    """

    num_rows: int
    _: dataclasses.KW_ONLY
    sharding: str = "hash"
    num_shards: int = 1
    unit: int = 1

    def __post_init__(self) -> None:
        """Checks the attributes."""
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"`sharding` must be one of {SHARDINGS}; received "
                f'{self.sharding!r}. "hash" spreads frequent ids evenly.'
            )
        if self.sharding == "hash" and self.num_rows > _MOST_HASHED_ROWS:
            raise ValueError(
                f'`num_rows` must be <= {_MOST_HASHED_ROWS} with "hash"; '
                f'received {self.num_rows}. Use sharding="contiguous".'
            )
        if not 1 <= self.num_shards <= self.most_shards:
            raise ValueError(
                f"`num_shards` must be >= 1 and, for {self.num_rows} rows, at "
                f"most {self.most_shards}; received {self.num_shards}. Use "
                "fewer shards for a small table."
            )

    @property
    def most_shards(self) -> int:
        """How many slices there can be."""
        return self.num_rows // self.unit

    @property
    def multiplier(self) -> int:
        """What ids are multiplied with: coprime to `num_rows`, so no two meet.

        Near `num_rows` over the golden ratio, successive multiples of it lie
        as far from each other as they can.
        """
        multiplier = max(1, round(self.num_rows / _GOLDEN_RATIO))
        while math.gcd(multiplier, self.num_rows) != 1:
            multiplier -= 1
        return multiplier

    @property
    def shard_sizes(self) -> list[int]:
        """Rows of each shard; the first ones hold a unit more, if any do."""
        ends = itertools.pairwise(self.starts)
        return [end - start for start, end in ends]

    @property
    def starts(self) -> list[int]:
        """First stored row of each shard, and `num_rows` at the end."""
        size, larger = divmod(self.most_shards, self.num_shards)
        return [
            (i * size + min(i, larger)) * self.unit
            for i in range(self.num_shards + 1)
        ]

    def with_shards(self, num_shards: int) -> "RowLayout":
        """Returns the same stored order, cut into other shards."""
        return dataclasses.replace(self, num_shards=num_shards)

    def storage_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows, int64, in which ids in [0, num_rows) are stored."""
        ids = tf.cast(ids, tf.int64)
        if self.sharding == "contiguous":
            return ids
        return ids * self.multiplier % self.num_rows

    def split(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the shards that hold stored rows, and the rows in these.

        The shards' indices are int32; the local rows int32 if every shard is
        small enough for it, else int64.
        """
        size, larger = divmod(self.most_shards, self.num_shards)
        size, larger = size * self.unit, larger * self.unit
        shards = rows // (size + self.unit if larger else size)
        if larger:
            # Beyond the larger shards, each block of `size` is a shard.
            shards = tf.maximum(shards, (rows - larger) // size)
        starts = shards * size
        if larger:
            starts += tf.minimum(shards * self.unit, tf.cast(larger, tf.int64))
        return tf.cast(shards, tf.int32), self.as_index(rows - starts)

    def partition(
        self, rows: tf.Tensor, *along: tf.Tensor
    ) -> list[tuple[tf.Tensor, ...]]:
        """Returns by shard its local rows, and what comes along with each.

        The tensors are `[n, ...]`, one entry for each stored row.
        """
        if self.num_shards == 1:
            return [(self.as_index(rows), *along)]
        shards, local_rows = self.split(rows)
        return list(
            zip(
                *(
                    tf.dynamic_partition(each, shards, self.num_shards)
                    for each in (local_rows, *along)
                ),
                strict=True,
            )
        )

    def as_index(self, local_rows: tf.Tensor) -> tf.Tensor:
        """Narrows local rows to int32 if every shard allows it."""
        small = self.shard_sizes[0] <= tf.int32.max
        return tf.cast(local_rows, tf.int32 if small else tf.int64)


def look_up(
    sources: Sequence[Any],
    layout: RowLayout,
    storage_rows: tf.Tensor,
    *,
    dtype: tf.DType,
) -> tf.Tensor:
    """Returns rows; the tape sees one gradient row for each distinct id.

    The sources are the shards `[rows_i, dim]` of the layout: tensors, or
    variables, for which the tape yields `tf.IndexedSlices` with distinct rows.
    `storage_rows` are int64 `[num_ids]`, the result is `[num_ids, dim]` of
    `dtype`; gradients are summed in the dtype of the sources.
    """
    wanted = Lookup.of(layout, storage_rows)
    found = [
        sources_lib.gather(source, rows)
        for source, rows in zip(sources, wanted.rows, strict=True)
    ]
    return wanted.vectors(found, dtype)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Which rows of which shards some stored rows are, each once.

    Attributes:
        rows: By shard the local rows, integers `[n_i]`, all different.
        places: Where each of these is among all, int32 by shard.
        positions: Position of each requested row among all, int32
            `[num_ids]`.
    """

    rows: Sequence[tf.Tensor]
    places: Sequence[tf.Tensor]
    positions: tf.Tensor

    @classmethod
    def of(cls, layout: RowLayout, storage_rows: tf.Tensor) -> "Lookup":
        """Finds them; `storage_rows` are int64 `[num_ids]`."""
        distinct, positions = tf.unique(storage_rows)
        places = tf.range(tf.size(distinct))
        by_shard = layout.partition(distinct, places)
        rows, places_by_shard = zip(*by_shard, strict=True)
        return cls(rows, places_by_shard, positions)

    def vectors(self, found: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns `[num_ids, dim]`, given what was found by shard."""
        if len(found) == 1:
            return expand(found[0], self.positions, dtype)
        rows = tf.dynamic_stitch(self.places, found)
        return expand(rows, self.positions, dtype)


def expand(rows: tf.Tensor, positions: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Repeats rows; the gradients of one row are summed before they leave.

    From `[n, dim]` and integers `[m]` in [0, n) to `[m, dim]` of `dtype`.
    """

    @tf.custom_gradient
    def repeated(rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
            segments = positions
            if isinstance(upstream, tf.IndexedSlices):
                segments = tf.gather(positions, upstream.indices)
                upstream = upstream.values
            return tf.math.unsorted_segment_sum(
                tf.cast(upstream, rows.dtype), segments, tf.shape(rows)[0]
            )

        return tf.gather(tf.cast(rows, dtype), positions), gradient

    return repeated(rows)


def sum_per_row(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums slices of the same row, so that each row comes once."""
    with tf.device(gradient.values.device):
        rows, positions = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(
            gradient.values, positions, tf.size(rows)
        )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def combine(vectors: tf.Tensor | tf.RaggedTensor, combiner: str | None) -> Any:
    """Reduces the vectors of each bag of ids to one.

    From floats, dense `[..., k, dim]` or ragged `[batch, (k), dim]`, to what
    `combined` returns. None returns the vectors as they are.
    """
    if combiner is None:
        return vectors
    dtype = vectors.dtype
    if combiner == "fm":
        # A difference of sums, of which half precision would leave little.
        wide = tf.cast(vectors, tf.float32) if dtype.size < 4 else vectors
        vectors = with_squared_norms(wide)
    if isinstance(vectors, tf.RaggedTensor):
        bag_of, num_bags = vectors.value_rowids(), vectors.nrows()
        total = tf.math.unsorted_segment_sum(vectors.values, bag_of, num_bags)
        sizes = vectors.row_lengths()[:, tf.newaxis]
    else:
        total = tf.reduce_sum(vectors, axis=-2)
        sizes = tf.shape(vectors)[-2]
    return tf.cast(combined(total, sizes, combiner), dtype)


def with_squared_norms(vectors: tf.Tensor | tf.RaggedTensor) -> Any:
    """Returns vectors `[..., dim + 1]` that end with their squared norm."""
    if isinstance(vectors, tf.RaggedTensor):
        return vectors.with_values(with_squared_norms(vectors.values))
    norms = tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True)
    return tf.concat([vectors, norms], axis=-1)


def combined(total: tf.Tensor, sizes: tf.Tensor, combiner: str) -> tf.Tensor:
    """Returns what a combiner makes of the sum of each bag's vectors.

    Zeros for a bag without ids. `"sum"`, `[..., dim]`, or divided by the number
    of ids (`"mean"`) or its square root (`"sqrtn"`); `sizes` are these numbers.
    `"fm"`, `[..., 1]`, the second-order term of a factorization machine, from
    sums `[..., dim + 1]` whose last element is the sum of the squared norms
    (Rendle 2010, lemma 3.1).
    """
    if combiner == "sum":
        return total
    if combiner == "fm":
        squared = tf.reduce_sum(
            tf.square(total[..., :-1]), axis=-1, keepdims=True
        )
        return (squared - total[..., -1:]) / 2
    sizes = tf.cast(sizes, total.dtype)
    divisor = sizes if combiner == "mean" else tf.sqrt(sizes)
    return tf.math.divide_no_nan(total, divisor)


def write_rows(variable: tf.Variable, first: int, values: tf.Tensor) -> None:
    """Overwrites rows from `first` on, where the variable lives.

    The variable, `[rows, ...]`, lives on one device and has the values' dtype.
    """
    with tf.device(variable.device):
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle,
            begin=[first],
            end=[first + int(values.shape[0])],
            strides=[1],
            value=values,
        )
