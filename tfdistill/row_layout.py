"""Which row of the stored table an id has, and which shard holds that row."""

import dataclasses
import math
from typing import Any

import tensorflow as tf

SHARDINGS = ("hash", "contiguous")
# The largest id times the multiplier (0.618 of the rows) must fit in int64.
_MOST_HASHED_ROWS = 3_000_000_000
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the rows of a table lie: id -> stored row -> (shard, local row).

    The stored order depends on `num_rows` and `sharding` alone. Shards are
    slices of it, so that files in stored order suit any number of shards.

    Attributes:
        num_rows: Number of ids, and of rows.
        sharding: `"hash"` spreads neighbouring ids, whose low numbers are
            often the frequent ones, evenly over the table (multiplicative
            hashing: Knuth, The Art of Computer Programming 3, 6.4);
            `"contiguous"` stores row i at i.
        num_shards: Number of slices; their sizes differ by one at most.

    Raises:
        ValueError: An attribute is out of its range.
    """

    num_rows: int
    _: dataclasses.KW_ONLY
    sharding: str = "hash"
    num_shards: int = 1

    def __post_init__(self) -> None:
        """Checks the attributes."""
        if self.num_rows < 1:
            raise ValueError(
                f"`num_rows` must be >= 1; received {self.num_rows}. A table "
                "without rows has no ids to look up."
            )
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
        if not 1 <= self.num_shards <= self.num_rows:
            raise ValueError(
                "`num_shards` must be >= 1 and at most the number of rows, "
                f"{self.num_rows}; received {self.num_shards}. Use fewer "
                "shards for a small table."
            )

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
        """Rows of each shard; the first ones hold one more, if any do."""
        size, larger = divmod(self.num_rows, self.num_shards)
        return [size + (i < larger) for i in range(self.num_shards)]

    @property
    def starts(self) -> list[int]:
        """First stored row of each shard, and `num_rows` at the end."""
        size, larger = divmod(self.num_rows, self.num_shards)
        return [i * size + min(i, larger) for i in range(self.num_shards + 1)]

    def with_shards(self, num_shards: int) -> "RowLayout":
        """Returns the same stored order, cut into other shards."""
        return dataclasses.replace(self, num_shards=num_shards)

    def storage_rows(self, ids: Any) -> tf.Tensor:
        """Returns the rows in which ids are stored.

        Args:
            ids: int32 or int64 tensor of any shape, in [0, num_rows).

        Returns:
            int64, of the same shape.
        """
        ids = tf.cast(ids, tf.int64)
        if self.sharding == "contiguous":
            return ids
        return ids * self.multiplier % self.num_rows

    def split(self, rows: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the shards that hold stored rows, and the rows in these.

        Args:
            rows: int64 tensor of any shape: stored rows.

        Returns:
            The shards' indices, int32; and the local rows, int32 where every
            shard is small enough for it, else int64.
        """
        size, larger = divmod(self.num_rows, self.num_shards)
        shards = rows // (size + 1 if larger else size)
        if larger:
            # Beyond the larger shards, each block of `size` is a shard.
            shards = tf.maximum(shards, (rows - larger) // size)
        starts = shards * size
        if larger:
            starts += tf.minimum(shards, tf.cast(larger, tf.int64))
        return tf.cast(shards, tf.int32), self.as_index(rows - starts)

    def as_index(self, local_rows: tf.Tensor) -> tf.Tensor:
        """Narrows local rows to int32 where every shard allows for it."""
        small = self.shard_sizes[0] <= tf.int32.max
        return tf.cast(local_rows, tf.int32 if small else tf.int64)
