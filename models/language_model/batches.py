"""Windows of the tokens of a text, by TensorFlow operations only.

No Python runs per batch and no array is part of the graph: a window is read
from the file, which TensorFlow maps into memory.
"""

import numpy as np
import tensorflow as tf

import tfdistill
from models.language_model import tokens
from tfdistill import data as tfdistill_data


def train_batches(
    tokens: tokens.Tokens,
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    sequence_length: int,
    mode: str = "disjoint",
    seed: int = 0,
) -> tf.data.Dataset:
    """Returns endless shuffled batches of a group's training windows.

    Window k has the tokens from `k * sequence_length` on; its labels are those
    one further. The order depends on the arguments only, so all workers of a
    group see the same one, and `skip(n)` continues a run.

    Full batches of (tokens int32 `[batch, sequence_length]`, labels alike).
    Disjoint groups share out whole documents.
    """
    first, last = share(tokens, cluster, mode=mode)
    num_windows = _num_windows(last - first, sequence_length, "train")
    return tfdistill_data.shuffled_batches(
        num_windows,
        batch_size=batch_size,
        seed=seed,
        group=cluster.group,
        examples="windows",
        read=lambda batches, _: _windows(
            batches, tokens, "train", first, sequence_length
        ),
    )


def validation_batches(
    tokens: tokens.Tokens,
    *,
    batch_size: int,
    sequence_length: int,
) -> tf.data.Dataset:
    """Returns the validation windows in order.

    The last tokens, if they do not fill a window, are left out.
    """
    number = tokens.num_tokens["validation"]
    num_windows = _num_windows(number, sequence_length, "validation")
    batches = tf.data.Dataset.range(num_windows).batch(batch_size)
    windows = _windows(batches, tokens, "validation", 0, sequence_length)
    return windows.prefetch(tf.data.AUTOTUNE)


def share(
    tokens: tokens.Tokens,
    cluster: tfdistill.Cluster,
    *,
    mode: str,
) -> tuple[int, int]:
    """Returns where a group's training tokens begin and end.

    Disjoint parts begin with a document each. They are about equally long,
    and samples of all documents, which are on file in drawn order.
    """
    total = tokens.num_tokens["train"]
    ends = tokens.train_documents()
    # Checks `mode` and the number of documents on the way.
    own = tfdistill_data.group_shard(
        tf.data.Dataset.range(len(ends)), cluster, mode=mode
    )
    if int(own.cardinality()) == len(ends):
        return 0, total
    groups = np.arange(1, cluster.num_groups)
    # The last document that ends at a group's even share, or before it.
    cuts = np.searchsorted(ends, groups * total // cluster.num_groups, "right")
    borders = [0, *ends[np.maximum(cuts, groups) - 1].tolist(), total]
    return borders[cluster.group], borders[cluster.group + 1]


def _num_windows(num_tokens: int, sequence_length: int, split: str) -> int:
    # The last label of a window is the first token behind it.
    num_windows = (num_tokens - 1) // sequence_length
    if num_windows < 1:
        raise ValueError(
            "`sequence_length` must leave room for a window and the next "
            f"token; received {sequence_length} for {num_tokens} tokens of "
            f"{split}. Use shorter sequences, or more text."
        )
    return num_windows


def _windows(
    batches: tf.data.Dataset,
    tokens: tokens.Tokens,
    split: str,
    first: int,
    sequence_length: int,
) -> tf.data.Dataset:
    path, number = str(tokens.path(split)), tokens.num_tokens[split]
    dtype = tf.as_dtype(tokens.dtype.newbyteorder("="))

    def read(windows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        stream = tf.raw_ops.ImmutableConst(
            dtype=dtype, shape=[number], memory_region_name=path
        )
        starts = first + windows[:, tf.newaxis] * sequence_length
        offsets = tf.range(sequence_length + 1, dtype=tf.int64)
        found = tf.cast(tf.gather(stream, starts + offsets), tf.int32)
        return found[:, :-1], found[:, 1:]

    return batches.map(read)
