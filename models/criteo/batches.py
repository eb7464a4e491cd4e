"""Batches from the fast form of a click log, by TensorFlow operations only.

No Python runs per batch and no array is part of the graph, so that a data set
can be sent to other processes, which then read the same files.
"""

import tensorflow as tf

import tfdistill
from models.criteo import converted
from models.criteo import rows
from tfdistill import data as tfdistill_data

Batch = tuple[dict[str, tf.Tensor], tf.Tensor]

# Stands for a missing integer.
MISSING = 0.0
# Parts that are shuffled into each other: 131,072 rows, 21 MB.
_WINDOW_PARTS = 16
_PARALLEL_READS = 2


def train_batches(
    binary: converted.Binary,
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
) -> tf.data.Dataset:
    """Returns endless shuffled batches of a group's training rows.

    Each epoch reads the part files in a new order and shuffles the rows of 16
    of them at a time: all rows, up to 131,072. The order depends on the
    arguments only, so all workers of a group see the same one, and `skip(n)`
    continues a run.

    All groups read all rows, which costs less than a copy for each number of
    groups; of disjoint ones row i is for group `i % num_groups`.
    """
    own_rows = _share(binary.num_rows["train"], cluster, mode)
    tfdistill_data.check_batch_size(
        batch_size, num_examples=len(own_rows), examples="rows"
    )
    names = [str(path) for path in binary.parts("train")]

    def epoch_windows(epoch: tf.Tensor) -> tf.data.Dataset:
        base = tf.constant([seed, cluster.group], tf.int64)
        key = tf.random.experimental.stateless_fold_in(base, epoch)
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(names), dtype=tf.int64), seed=key
        )
        parts = tf.data.Dataset.from_tensor_slices(order).map(
            lambda part: (part, tf.io.read_file(tf.gather(names, part))),
            num_parallel_calls=_PARALLEL_READS,
            deterministic=True,
        )

        def mix(window: tf.Tensor, read: tuple[tf.Tensor, tf.Tensor]) -> Batch:
            fold = tf.random.experimental.stateless_fold_in(key, window)
            own = _select(own_rows, *read, binary.part_rows)
            mixed = tf.random.experimental.stateless_shuffle(own, seed=fold)
            return _features(mixed)

        return parts.batch(_WINDOW_PARTS).enumerate().map(mix)

    def batches(first: int) -> tf.data.Dataset:
        epoch, left_out = divmod(first * batch_size, len(own_rows))
        epochs = tf.data.Dataset.range(epoch, tf.int64.max)
        windows = epochs.flat_map(epoch_windows).prefetch(1)
        # Rows to be left out of a batch that began in the epoch before.
        filled, number = -left_out % batch_size, -(-left_out // batch_size)
        odd = tf.nest.map_structure(
            lambda spec: tf.zeros([filled, *spec.shape[1:]], spec.dtype),
            windows.element_spec,
        )
        rows = tf.data.Dataset.from_tensors(odd).concatenate(windows)
        full = rows.rebatch(batch_size, drop_remainder=True)
        return full.skip(number).prefetch(tf.data.AUTOTUNE)

    return tfdistill_data.resumable(batches)


def validation_batches(
    binary: converted.Binary,
    *,
    batch_size: int,
) -> tf.data.Dataset:
    """Returns the validation rows in the order of the text."""
    names = [str(path) for path in binary.parts("validation")]
    records = tf.data.FixedLengthRecordDataset(names, rows.RECORD_BYTES)
    known = tf.data.experimental.assert_cardinality(
        binary.num_rows["validation"]
    )
    batches = records.apply(known).batch(batch_size)
    batches = batches.map(lambda records: _features(_decoded(records)))
    return batches.prefetch(tf.data.AUTOTUNE)


def _share(num_rows: int, cluster: tfdistill.Cluster, mode: str) -> range:
    """Returns the numbers of a group's rows."""
    # Checks `mode` and the number of rows on the way.
    own = tfdistill_data.group_shard(
        tf.data.Dataset.range(num_rows), cluster, mode=mode
    )
    if int(own.cardinality()) == num_rows:
        return range(num_rows)
    return range(cluster.group, num_rows, cluster.num_groups)


def _decoded(records: tf.Tensor) -> tf.Tensor:
    words = tf.io.decode_raw(records, tf.int32)
    return tf.reshape(words, [-1, rows.NUM_COLUMNS])


def _select(
    own_rows: range, parts: tf.Tensor, contents: tf.Tensor, part_rows: int
) -> tf.Tensor:
    """Returns a group's rows of some part files, `[rows, 40]`."""
    records = _decoded(tf.strings.reduce_join(contents))
    if own_rows.step == 1:
        return records
    lengths = tf.cast(
        tf.strings.length(contents) // rows.RECORD_BYTES, tf.int64
    )
    # The number of each row in the split, though the parts are in any order.
    shifts = parts * part_rows - tf.cumsum(lengths, exclusive=True)
    numbers = tf.range(tf.reduce_sum(lengths)) + tf.repeat(shifts, lengths)
    return tf.boolean_mask(records, numbers % own_rows.step == own_rows.start)


def _features(records: tf.Tensor) -> Batch:
    floats = tf.bitcast(records[:, : rows.FIRST_CATEGORY], tf.float32)
    integers = floats[:, 1:]
    known = tf.where(tf.math.is_nan(integers), MISSING, integers)
    categories = records[:, rows.FIRST_CATEGORY :]
    return {"integers": known, "categories": categories}, floats[:, :1]
