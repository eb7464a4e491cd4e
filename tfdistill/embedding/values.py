"""What the rows of a table start with, however they are cut into shards."""

import random
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.system import keras_internals

# Any odd constants would do: they keep the seeds of blocks apart.
_SEED_FACTOR, _SEED_RANGE = 1_000_003, 2**31 - 1


class TableValues:
    """What the rows of one table start with, drawn block by block.

    A table may be larger than any one task's memory, so no task makes the
    whole of it. Each block of rows has its own seed: the values
    depend neither on the number of shards nor on where they are drawn.
    """

    def __init__(
        self,
        initializer: keras.initializers.Initializer,
        layout: table_rows.RowLayout,
        dim: int,
    ) -> None:
        """Draws nothing yet.

        An initializer with a `seed` in its configuration gets another one for
        each block; any other is called as it is.
        """
        self._initializer = initializer
        self._layout = layout
        self._dim = dim
        # Keras gives an initializer a seed when it is made, which follows from
        # `keras.utils.set_random_seed`. If it has none, one is drawn that way.
        seed = keras_internals.seed_of(initializer)
        if seed is None:
            seed = random.randint(1, 10**9)
        self._seed = seed % _SEED_RANGE
        self._block_rows = table_rows.rows_per_block(dim)

    def of_shard(
        self, shard: int, shape: object, dtype: str | tf.DType | None = None
    ) -> tf.Tensor:
        """Returns the values of one shard, `[rows, dim]`, all at once."""
        parts = [
            self._block(block, dtype)[first:last]
            for block, first, last, _ in self._pieces(shard)
        ]
        return tf.concat(parts, axis=0)

    def fill(self, shard: int, variable: tf.Variable) -> None:
        """Writes one shard's values, block by block, on its own device."""
        for block, first, last, row in self._pieces(shard):
            with tf.device(variable.device):
                values = self._block(block, variable.dtype)[first:last]
            table_rows.write_rows(variable, row, values)

    def _pieces(self, shard: int) -> list[tuple[int, int, int, int]]:
        """Parts of blocks in a shard: block, first, last, row of the shard."""
        start, end = self._layout.starts[shard : shard + 2]
        size = self._block_rows
        return [
            (
                block,
                max(start - block * size, 0),
                min(end - block * size, size),
                max(block * size - start, 0),
            )
            for block in range(start // size, -(-end // size))
        ]

    def _block(self, block: int, dtype: str | tf.DType | None) -> tf.Tensor:
        first = block * self._block_rows
        num_rows = min(self._block_rows, self._layout.num_rows - first)
        seed = (self._seed * _SEED_FACTOR + block) % _SEED_RANGE
        initializer = self._seeded(seed, num_rows)
        dtype = keras.backend.standardize_dtype(dtype)
        return initializer((num_rows, self._dim), dtype=dtype)

    def _seeded(self, seed: int, num_rows: int) -> Any:
        original = self._initializer
        if isinstance(original, keras.initializers.VarianceScaling):
            # Its variance follows from the shape: the table's, not a block's.
            return keras.initializers.VarianceScaling(
                scale=original.scale * self._fan(original.mode, num_rows),
                mode=original.mode,
                distribution=original.distribution,
                seed=seed,
            )
        config = original.get_config()
        if "seed" not in config:
            return original
        return type(original).from_config({**config, "seed": seed})

    def _fan(self, mode: str, num_rows: int) -> float:
        """What Keras divides a block's variance by, over the table's."""
        if mode == "fan_out":
            return 1.0
        outputs = self._dim if mode == "fan_avg" else 0
        return (num_rows + outputs) / (self._layout.num_rows + outputs)
