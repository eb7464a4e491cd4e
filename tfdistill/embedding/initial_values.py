"""Initial values of a table's shards, drawn block by block.

A table may be larger than any one task's memory, so no task makes the whole
of it. Each block of rows comes from a seed of its own: the values depend
neither on the number of shards nor on who draws them.
"""

import random
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import rows

_BLOCK_ELEMENTS = 2**22
_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones)
# Any odd constants would do: they keep the seeds of blocks apart.
_SEED_FACTOR, _SEED_RANGE = 1_000_003, 2**31 - 1


class TableValues:
    """What the rows of one table start with."""

    def __init__(
        self,
        initializer: keras.initializers.Initializer,
        *,
        layout: rows.RowLayout,
        dim: int,
        seed: int,
    ) -> None:
        """Draws nothing yet.

        Args:
            initializer: Makes values of any shape. One with a `seed` in its
                configuration gets another for each block; any other is
                called once for each block as it is.
            layout: The rows and shards of the table.
            dim: Length of a row.
            seed: Decides on all values, together with the initializer.
        """
        self._initializer = initializer
        self._layout = layout
        self._dim = dim
        self._seed = seed
        self._block_rows = max(1, _BLOCK_ELEMENTS // dim)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same, so that no block need be drawn."""
        if isinstance(self._initializer, keras.initializers.Constant):
            return not hasattr(self._initializer.value, "__len__")
        return isinstance(self._initializer, _CONSTANTS)

    def initializer(self, shard: int) -> Any:
        """Returns what makes one shard's values at once, for `add_weight`."""
        if self.is_constant:
            return self._initializer
        return lambda shape, dtype=None: self.of_shard(shard, dtype)

    def of_shard(self, shard: int, dtype: Any) -> tf.Tensor:
        """Returns the values of one shard, `[rows, dim]`, all at once."""
        parts = [
            self._block(block, dtype)[first:last]
            for block, first, last, _ in self._pieces(shard)
        ]
        return tf.concat(parts, axis=0)

    def fill(self, shard: int, variable: Any) -> None:
        """Writes one shard's values into its variable, block by block.

        Args:
            shard: Index of the shard.
            variable: A `tf.Variable` `[rows, dim]`, maybe one with a copy on
                each replica: all of them get the same values.
        """
        copies = tf.distribute.get_strategy().experimental_local_results(
            variable
        )
        for block, first, last, row in self._pieces(shard):
            with tf.device(copies[0].device):
                values = self._block(block, variable.dtype)[first:last]
            for copy in copies:
                rows.write_rows(copy, row, values)

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

    def _block(self, block: int, dtype: Any) -> tf.Tensor:
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


def agreed_seed(initializer: Any, seed: int | None) -> int:
    """Returns the seed of a table, the same on all workers.

    Args:
        initializer: The table's initializer; its own seed counts where
            `seed` is None. Keras gives it one when it is made, from the seed
            of `keras.utils.set_random_seed`.
        seed: The user's seed, or None.

    Returns:
        An int in [0, 2**31).
    """
    if seed is None:
        own = getattr(initializer, "seed", None)
        # As Keras draws where it is given no seed.
        seed = own if isinstance(own, int) else random.randint(1, 10**9)
    seed %= _SEED_RANGE
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return seed
    # A new variable takes the chief's value on every worker.
    shared = tf.Variable(
        lambda: tf.constant(seed, tf.int64), trainable=False, dtype=tf.int64
    )
    return int(strategy.experimental_local_results(shared)[0].numpy())
