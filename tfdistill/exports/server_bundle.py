"""A checkpoint written and read by the servers that hold the pieces of it.

The rows of a table never pass through the coordinator: each parameter server
writes its rows to its own part, block by block, and the parts are merged into
one TensorFlow checkpoint in which the table is a single tensor.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import sources
from tfdistill.exports import checkpoints
from tfdistill.exports import quantized


class NotFiniteError(ValueError):
    """A weight that holds NaN or infinity, which is not written."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} holds NaN or infinite values.")
        self.name = name


class BundleWriter:
    """Writes one checkpoint from any number of tasks.

    All tasks must see the directory: it lies on a shared file system wherever
    they run on several machines.
    """

    def __init__(self, prefix: str) -> None:
        """Takes a prefix, in an existing directory; writes nothing yet."""
        self._prefix = prefix
        self._directory = f"{prefix}.parts"
        self._parts: list[str] = []
        tf.io.gfile.makedirs(self._directory)

    def add(self, tensors: Mapping[str, tf.Tensor]) -> None:
        """Writes whole tensors, by checkpoint key, on the task that calls."""
        if tensors:
            checkpoints.write(self._next_part(), tensors)

    def add_rows(
        self,
        key: str,
        shards: Sequence[tf.Variable],
        *,
        encode: Callable[[tf.Tensor], Mapping[str, tf.Tensor]] | None = None,
    ) -> None:
        """Writes variables as one tensor, each on the task that holds it.

        They are `[rows_i, dim]` and follow one another. `encode` returns the
        tensors to write of some rows, by key; by default they are written as
        they are. ValueError if a value is NaN or infinite.
        """
        num_rows = sum(int(shard.shape[0]) for shard in shards)
        dim = int(shards[0].shape[1])
        start = 0
        for shard in shards:
            for first, last in table_rows.blocks(int(shard.shape[0]), dim):
                with tf.device(shard.device):
                    rows = tf.gather(shard, tf.range(first, last))
                    finite = _all_finite(rows)
                    parts = encode(rows) if encode else {key: rows}
                    place = start + first, last - first
                    tf.raw_ops.SaveV2(
                        prefix=self._next_part(),
                        tensor_names=list(parts),
                        shape_and_slices=[
                            _slice(num_rows, int(part.shape[1]), *place)
                            for part in parts.values()
                        ],
                        tensors=list(parts.values()),
                    )
                if not bool(finite):
                    raise NotFiniteError(key)
            start += int(shard.shape[0])

    def finish(self) -> None:
        """Merges the parts; the checkpoint is whole from here on."""
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=self._parts,
                destination_prefix=self._prefix,
                delete_old_dirs=False,
            )
        tf.io.gfile.rmtree(self._directory)

    def _next_part(self) -> str:
        part = f"{self._directory}/part_{len(self._parts)}"
        self._parts.append(part)
        return part


def read_rows(
    prefix: str,
    key: str,
    shards: Sequence[tf.Variable],
    *,
    half: int | None = None,
    here: bool = False,
) -> bool:
    """Reads one tensor into variables, each on the task that holds it.

    They are `[rows_i, dim]` and follow one another; `half`, 0 or 1, is which
    half of each one's rows to fill. `here`: only this process can read the
    files, which sends the rows. What is quantized by row is widened. Returns
    whether all values are finite; they were written in any case.
    """
    parts = 1 if half is None else 2
    counts = [int(shard.shape[0]) // parts for shard in shards]
    dim = int(shards[0].shape[1])
    total, start, finite = sum(counts), 0, True
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    keys = quantized.keys_of(key, dtypes)
    if any(shapes[name][0] != total for name in keys):
        raise ValueError(f"{key} must have {total} rows, each with its scale.")
    for shard, count in zip(shards, counts, strict=True):
        offset = count * (half or 0)
        for first, last in table_rows.blocks(count, dim):
            place = start + first, last - first
            with tf.device("CPU:0" if here else shard.device):
                parts = tf.raw_ops.RestoreV2(
                    prefix=prefix,
                    tensor_names=keys,
                    shape_and_slices=[
                        _slice(total, shapes[name][1], *place) for name in keys
                    ],
                    dtypes=[dtypes[name] for name in keys],
                )
            with tf.device(shard.device):
                rows = quantized.whole(
                    key,
                    dict(zip(keys, parts, strict=True)),
                    [last - first, dim],
                    shard.dtype,
                )
                rows = tf.cast(rows, shard.dtype)
                all_finite = _all_finite(rows)
                table_rows.write_rows(shard, offset + first, rows)
            finite = finite and bool(all_finite)
        start += count
    return finite


def _all_finite(rows: tf.Tensor) -> tf.Tensor:
    if not rows.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(rows))


def _slice(num_rows: int, dim: int, first: int, count: int) -> str:
    return f"{num_rows} {dim} {first},{count}:0,{dim}"


def send_rows(
    value: object, shards: Sequence[tf.Variable], *, half: int
) -> None:
    """Sends a whole table to half of the rows of each of its shards.

    `value` is a tensor or what is quantized by row, which is widened here.
    """
    if not isinstance(value, sources.OwnRows):
        value = tf.convert_to_tensor(value)
    start = 0
    for shard in shards:
        count = int(shard.shape[0]) // 2
        for first, last in table_rows.blocks(count, int(shard.shape[1])):
            with tf.device("CPU:0"):
                place = tf.range(start + first, start + last)
                rows = sources.gather(value, place)
                rows = tf.cast(rows, shard.dtype)
            table_rows.write_rows(shard, half * count + first, rows)
        start += count
